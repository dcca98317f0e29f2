"""What a training run says at its start and at its end: a whole prompt; accuracy and answers before and after."""

from typing import Any

import pyarrow.parquet as pq

from qerl.metrics import COMPLETIONS, format_completions, read_metrics, say
from qerl.report_plot import plot_learning_curve
from qerl.run import Preparation, Run

SAMPLES_SHOWN = 3


def introduce(prepared: Preparation) -> None:
    """Print what the user should know before the first step, with one whole prompt as the model will see it."""
    for note in prepared.data.notes:
        say(f"note: {note}")
    say(f"first prompt:\n{prepared.tokenizer.decode(list(prepared.data.train.prompt_ids[0]))}\n")


def summarize(run: Run) -> None:
    """Print the summary and draw the learning curve; for a run that was stopped, how to continue."""
    if run.stop_requested:
        say(f"stopped; {run.run_dir} is saved and the same command continues it")
        return
    evaluations = [line for line in read_metrics(run.run_dir) if "eval/accuracy" in line]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        num = int(last["eval/num_completions"])
        before, after = _samples(run, first["step"], last["step"])
        say(f"\nbefore training (step {first['step']}):\n{format_completions(before)}")
        say(f"\nafter training (step {last['step']}):\n{format_completions(after)}")
        say(
            f"\nheld-out accuracy ({num} completions at temperature {run.config.rollout.temperature:g}): "
            f"{first['eval/accuracy']:.3f} before, {last['eval/accuracy']:.3f} after"
        )
    curve = plot_learning_curve(run.run_dir)
    say(f"learning curve:  {curve}")
    say(f"run folder:      {run.run_dir}  (adapter/ loads with PeftModel.from_pretrained)")
    say(f'ask it:          python -m qerl.sample {run.run_dir} "..."')


def _samples(run: Run, first: int, last: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same problems before and after, one sample of each; what was wrong and became right comes first."""
    pairs = sorted(
        zip(_eval_rows(run, first), _eval_rows(run, last), strict=True),
        key=lambda pair: (pair[0]["reward"] or 0) - (pair[1]["reward"] or 0),
    )
    of_problem = {before["problem_id"]: (before, after) for before, after in reversed(pairs)}
    chosen = list(of_problem.values())[::-1][:SAMPLES_SHOWN]
    return [before for before, _ in chosen], [after for _, after in chosen]


def _eval_rows(run: Run, step: int) -> list[dict[str, Any]]:
    rows = pq.read_table(run.run_dir / COMPLETIONS / f"{step}.parquet").to_pylist()
    return [row for row in rows if row["kind"] == "eval"]
