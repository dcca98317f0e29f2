"""What a training run says at its start and at its end: a whole prompt; accuracy and answers before and after."""

from typing import Any

from qerl.errors import UserError
from qerl.metrics import COMPLETIONS, format_completions, read_completions, read_metrics, say
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
    evaluations = [
        line
        for line in read_metrics(run.run_dir)
        if None not in (line.get("eval/accuracy"), line.get("eval/num_completions"))
    ]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        try:
            _show_samples(run, first["step"], last["step"])
        except (
            UserError
        ) as error:  # a damaged table is no reason to end a finished run with an error
            say(f"note: {error}")
        say(
            f"\nheld-out accuracy (at temperature {run.config.rollout.temperature:g}): "
            f"{_accuracy(first)} before, {_accuracy(last)} after"
        )
    curve = plot_learning_curve(run.run_dir)
    say(f"learning curve:  {curve}")
    say(f"run folder:      {run.run_dir}  (adapter/ loads with PeftModel.from_pretrained)")
    say(f'ask it:          python -m qerl.sample {run.run_dir} "..."')


def _accuracy(evaluation: dict[str, Any]) -> str:
    return (
        f"{evaluation['eval/accuracy']:.3f} of {evaluation['eval/num_completions']:g} completions"
    )


def _show_samples(run: Run, first: int, last: int) -> None:
    """The same problems before and after, one sample of each; what was wrong and became right comes first.

    The two evaluations may be of different sizes: settings of evaluation may change when a run goes on.
    """
    old, new = _eval_rows(run, first), _eval_rows(run, last)
    pairs = sorted(
        ((old[key], new[key]) for key in old if key in new),
        key=lambda pair: (pair[0]["reward"] or 0) - (pair[1]["reward"] or 0),
    )
    of_problem = {before["problem_id"]: (before, after) for before, after in reversed(pairs)}
    chosen = list(of_problem.values())[::-1][:SAMPLES_SHOWN]
    say(f"\nbefore training (step {first}):\n{format_completions([pair[0] for pair in chosen])}")
    say(f"\nafter training (step {last}):\n{format_completions([pair[1] for pair in chosen])}")


def _eval_rows(run: Run, step: int) -> dict[tuple[str, int], dict[str, Any]]:
    """By problem and sample."""
    rows = read_completions(run.run_dir / COMPLETIONS / f"{step}.parquet").to_pylist()
    return {(row["problem_id"], row["sample_index"]): row for row in rows if row["kind"] == "eval"}
