"""Score a model on held-out problems, or a trained adapter beside its base on the same problems with the same seeds.

    python -m qerl.evaluate --model quickstart                       the base
    python -m qerl.evaluate runs/NAME                                a run's adapter beside its base
    python -m qerl.evaluate --model quickstart --adapter FOLDER      any adapter

The loop evaluates through the same function, `qerl.evaluation.policy.evaluate_policy`. Manual: docs/evaluation.md.
"""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.config import Config
from qerl.errors import UserError
from qerl.settings.cli import ExtraFlag, run_main
from qerl.settings.run_arguments import parse_run_arguments

if TYPE_CHECKING:
    from qerl.build import Data, Inference
    from qerl.evaluation.policy import Evaluation
    from qerl.evaluation_arms import ProbeDifference

ROWS_SHOWN = 5
DEFAULT_K = 4

K = ExtraFlag(
    "k",
    "Samples a problem: the k of avg@k, pass@k and maj@k. Default: 4, or log.eval_num_generations where that is more.",
    takes_value=True,
)
GREEDY = ExtraFlag("greedy", "The most likely token each time, one completion a problem.")
OUT = ExtraFlag(
    "out",
    "Folder for the results, new or empty. Default: RUN/evaluations/N, or evaluations/MODEL-TASK/N.",
    takes_value=True,
)
EXAMPLES = (
    "python -m qerl.evaluate runs/my-run                                  its adapter beside its base",
    "python -m qerl.evaluate runs/my-run --k 8 --eval-size 500            more samples, more problems",
    "python -m qerl.evaluate runs/my-run --greedy",
    "python -m qerl.evaluate --model qwen2.5-7b --task gsm8k              a base alone",
    "python -m qerl.evaluate --model qwen2.5-7b --adapter FOLDER --task gsm8k",
)


def main(argv: list[str] | None = None) -> int:
    """Parse, load, evaluate, print and write. Returns the process' exit code."""
    config, options, adapter = parse_run_arguments(
        argv,
        prog="python -m qerl.evaluate",
        description=(
            "Score a model, and a trained adapter beside it, on held-out problems: avg@k, pass@k and maj@k with 95 % "
            "bootstrap intervals over problems, and the paired change. --eval-size says how many problems."
        ),
        extra_flags=(K, GREEDY, OUT),
        examples=EXAMPLES,
    )
    k = _samples(config, options)
    if adapter is not None:
        config = _with_adapters_own_settings(config, adapter)
    folder = _results_folder(config, options, adapter)
    from qerl.build import build_data, load_tokenizer, open_inference
    from qerl.evaluation.policy import with_own_grader
    from qerl.evaluation.report import compare, table, verdict, write_report
    from qerl.evaluation_arms import evaluate_arm, evaluate_both
    from qerl.metrics import format_completions, say
    from qerl.model.source import resolve_model
    from qerl.tasks.pool import open_pool

    source = resolve_model(config.model, config.revision)
    tokenizer = load_tokenizer(source, config.trust_remote_code)
    data = build_data(config, tokenizer, for_training=False)
    if data.test is None:
        raise UserError("nothing is held out: set eval_size above 0, or give the task a test split")
    data = replace(data, rewards=with_own_grader(data.rewards, data.task))
    inference = open_inference(config, source, tokenizer)
    if options.greedy:
        inference = replace(inference, sampling=replace(inference.sampling, temperature=0.0))
    say(_description(config, data, inference, k))
    proof = None
    with open_pool(data.rewards, config.reward) as pool:
        if adapter is None:
            evaluations = {
                "base": evaluate_arm("base", config, data, inference, pool, k, version=0)
            }
        else:
            evaluations, proof = evaluate_both(config, data, inference, pool, k, adapter)
    comparison = compare(evaluations["base"], evaluations.get("adapter"), seed=config.seed)
    sentences = verdict(comparison)
    say("")
    say(format_completions(list(evaluations.values())[-1].rows[::k][:ROWS_SHOWN]))
    say(f"\n{table(comparison)}\n")
    for line in (*_remarks(evaluations), *sentences):
        say(line)
    folder.mkdir(parents=True, exist_ok=True)
    settings = _settings(config, data, inference, k, adapter, proof)
    write_report(folder, settings, comparison, evaluations, sentences)
    say(f"written to {folder}: summary.json, problems.jsonl, completions.parquet")
    return 0


# ---- arguments ----


def _samples(config: Config, options: Namespace) -> int:
    """Samples a problem. Raises UserError for a number that is none, and for several greedy ones."""
    if options.k is not None and (not options.k.isdecimal() or int(options.k) == 0):
        raise UserError(f"--k {options.k}: give a whole number of samples, 1 or more")
    if options.greedy:
        if options.k not in (None, "1"):
            raise UserError(
                f"--greedy and --k {options.k}: greedy completions of a problem are all the same; leave one out"
            )
        return 1
    return int(options.k or max(DEFAULT_K, config.log.eval_num_generations))


def _with_adapters_own_settings(config: Config, adapter: Path) -> Config:
    """Rank, scale and targets as the adapter has them; the base is the base, not the adapter that a run started from."""
    try:
        saved = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        own = {
            "lora_r": saved["r"],
            "lora_alpha": saved["lora_alpha"],
            "use_rslora": saved.get("use_rslora", False),
        }
        targets = saved["target_modules"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{adapter}/adapter_config.json: not a PEFT LoRA adapter ({error})"
        ) from error
    if isinstance(targets, list):
        own["lora_target_modules"] = tuple(sorted(targets))
    lora = config.lora.model_copy(update={**own, "init_adapter": None})
    return config.model_copy(update={"lora": lora})


def _results_folder(config: Config, options: Namespace, adapter: Path | None) -> Path:
    """A folder that is new or empty; results are never written over."""
    if options.out is not None:
        folder = Path(options.out)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--out {folder}: exists and is not an empty folder")
        return folder
    if adapter is not None and (adapter.parent / "config.json").is_file():
        root = adapter.parent / "evaluations"
    else:
        model = config.model.rstrip("/").rpartition("/")[2].replace(":", "-")
        task = (config.task.name or "dataset").replace("/", "-")
        root = Path("evaluations") / f"{model}-{task}"
    taken = [int(path.name) for path in root.glob("*") if path.name.isdecimal()]
    return root / str(max(taken, default=0) + 1)


# ---- what is said and written ----


def _description(config: Config, data: "Data", inference: "Inference", k: int) -> str:
    assert data.test is not None
    greedy = inference.sampling.temperature == 0
    how = "greedy" if greedy else f"temperature {inference.sampling.temperature:g}"
    return (
        f"{config.model} ({config.quant}) on {data.task.name}: {len(data.test.problems)} held-out problems, "
        f"{k} completion{'s' if k > 1 else ''} each, {how}, seed {config.seed}; {_rule(data)}"
    )


def _rule(data: "Data") -> str:
    from qerl.evaluation.policy import correctness_reward

    name = correctness_reward(data.rewards, data.task)
    own = name in data.task.reward_funcs
    return f"right is what the reward {name} gives at least 1" + (
        "" if own else " (the task has no grader of its own, so the first reward decides)"
    )


def _remarks(evaluations: "dict[str, Evaluation]") -> list[str]:
    lines = []
    for arm, found in evaluations.items():
        metrics = found.metrics
        lines.append(
            f"{arm}: {metrics['completions/mean_length']:.1f} tokens on average, "
            f"{metrics['completions/clipped_ratio']:.1%} cut at the length limit"
            + (
                "; raise --max-completion-length"
                if metrics["completions/clipped_ratio"] > 0.5
                else ""
            )
        )
        if found.num_ungraded:
            lines.append(f"{arm}: {found.num_ungraded} problems left out, since no answer is known")
        if found.num_failures:
            lines.append(
                f"{arm}: a reward failed on {found.num_failures} completions; they count as wrong"
            )
    return lines


def _settings(
    config: Config,
    data: "Data",
    inference: "Inference",
    k: int,
    adapter: Path | None,
    proof: "ProbeDifference | None",
) -> dict[str, Any]:
    """What was evaluated and how, for summary.json."""
    from qerl import __version__
    from qerl.evaluation.policy import correctness_reward

    settings: dict[str, Any] = {
        "model": config.model,
        "quant": config.quant,
        "adapter": None if adapter is None else str(adapter),
        "task": data.task.name,
        "correctness_reward": correctness_reward(data.rewards, data.task),
        "k": k,
        "temperature": inference.sampling.temperature,
        "seed": config.seed,
        "engine": type(inference.engine).__name__,
        "qerl": __version__,
        "config": config.model_dump(mode="json"),
    }
    if proof is not None:
        settings["proof_of_a_difference"] = vars(proof)
    return settings


if __name__ == "__main__":
    sys.exit(run_main(main))
