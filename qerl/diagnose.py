"""Say why a run learns, or does not, from its folder alone: while it runs, or afterwards.

    python -m qerl.diagnose runs/NAME

Looks at groups without spread, truncation, constant reward terms, answers that are not found, gradient and adapter norm,
and how far rollout and trainer agree. Nothing is computed with the model.
"""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.errors import UserError
from qerl.settings.cli import ExtraFlag, parse_arguments, run_main

if TYPE_CHECKING:
    from qerl.diagnosis.findings import Finding

RUN = ExtraFlag("run", "Run folder.", positional=True)
STEPS = ExtraFlag("steps", "Steps to look at, the last ones.", takes_value=True, default="20")


def main(argv: list[str] | None = None) -> int:
    """Read, judge, print. Returns 1 if nothing can be learnt like this, else 0."""
    layer, options = parse_arguments(
        sys.argv[1:] if argv is None else argv,
        prog="python -m qerl.diagnose",
        description="Say why a run learns, or does not: python -m qerl.diagnose RUN.",
        extra_flags=(RUN, STEPS),
        examples=(
            "python -m qerl.diagnose runs/NAME",
            "python -m qerl.diagnose runs/NAME --steps 50",
        ),
    )
    if options.run is None:
        raise UserError("which run? python -m qerl.diagnose RUN takes a run folder")
    if layer:
        raise UserError(f"{next(iter(layer))}: a run has its settings already; diagnose takes none")
    if not options.steps.isdecimal() or int(options.steps) == 0:
        raise UserError(f"--steps {options.steps}: give a whole number of steps, 1 or more")
    from qerl.diagnosis.figures import describe_figures, figures_of
    from qerl.diagnosis.findings import findings_of_metrics, findings_of_samples, recent_rows
    from qerl.metrics import read_metrics, say
    from qerl.run_folder import read_run_config

    run_dir = Path(options.run)
    config = read_run_config(run_dir)["config"]
    lines = [line for line in read_metrics(run_dir) if "train/reward" in line]
    if not lines:
        raise UserError(f"{run_dir} has no finished training step yet; there is nothing to look at")
    steps = [line["step"] for line in lines[-int(options.steps) :]]
    rows = recent_rows(run_dir, steps)
    findings = []
    say(
        f"{run_dir}: {len(lines)} steps; looking at {steps[0]} to {steps[-1]}, {len(rows)} completions"
    )
    if rows:
        figures = figures_of(rows)
        say("\n".join(describe_figures(figures)))
        findings += findings_of_samples(figures, config["rollout"]["max_completion_length"])
    findings += findings_of_metrics(lines)
    findings += _adapter_findings(run_dir)
    order = ("stop", "warning", "fine")
    for finding in sorted(findings, key=lambda finding: order.index(finding.kind)):
        say(finding.line())
    return int(any(finding.kind == "stop" for finding in findings))


def _adapter_findings(run_dir: Path) -> "list[Finding]":
    """The norm of what was learnt: an adapter whose B matrices are 0 changes nothing."""
    from safetensors import safe_open

    from qerl.diagnosis.findings import Finding

    path = run_dir / "adapter" / "adapter_model.safetensors"
    if not path.exists():
        return [Finding("fine", "no adapter is saved yet")]
    total = 0.0
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 (safe_open is no dictionary)
            if "lora_B" in name:
                total += float((file.get_tensor(name).astype("float64") ** 2).sum())
    norm = math.sqrt(total)
    if norm == 0:
        return [
            Finding(
                "stop",
                "the saved adapter is 0: it has learnt nothing",
                "no group had spread, or the learning rate was 0",
            )
        ]
    return [Finding("fine", f"adapter norm {norm:.3g} (of its B matrices, which begin at 0)")]


if __name__ == "__main__":
    sys.exit(run_main(main))
