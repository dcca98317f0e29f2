"""Score a model on held-out problems, or a trained adapter beside its base on the same problems with the same seeds.

    python -m qerl.evaluate --model quickstart                       the base
    python -m qerl.evaluate runs/NAME                                a run's adapter beside its base
    python -m qerl.evaluate --model quickstart --adapter FOLDER      any adapter

The loop evaluates through the same function, `qerl.evaluation.evaluate_policy`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.cli import run_main
from qerl.errors import UserError
from qerl.run_arguments import parse_run_arguments

if TYPE_CHECKING:
    from qerl.evaluation import Evaluation

ROWS_SHOWN = 5


def main(argv: list[str] | None = None) -> int:
    """Parse, load, evaluate, print. Returns the process' exit code."""
    config, _, adapter = parse_run_arguments(
        argv,
        prog="python -m qerl.evaluate",
        description="Score a model, and a trained adapter beside it, on held-out problems.",
    )
    from qerl.build import build_data, load_tokenizer, open_inference
    from qerl.evaluation import evaluate_policy
    from qerl.metrics import format_completions, say
    from qerl.model.source import resolve_model
    from qerl.tasks.pool import RewardPool

    source = resolve_model(config.model, config.revision)
    tokenizer = load_tokenizer(source, config.trust_remote_code)
    data = build_data(config, tokenizer)
    problems = data.test
    if problems is None:
        raise UserError("nothing is held out: set eval_size above 0, or give the task a test split")
    inference = open_inference(config, source, tokenizer)

    def evaluate(pool: RewardPool) -> "Evaluation":
        return evaluate_policy(
            inference.engine,
            tokenizer,
            problems,
            pool,
            data.rewards,
            inference.sampling,
            num_generations=config.log.eval_num_generations,
            seed=config.seed,
            version=0,
        )

    workers, timeout = config.reward.reward_workers, config.reward.reward_timeout_s
    with RewardPool(data.rewards, num_workers=workers, timeout_s=timeout) as pool:
        last = base = evaluate(pool)
        say(f"{config.model} ({config.quant}): {_in_words(base)}")
        if adapter is not None:
            inference.policy.load_adapter(adapter)
            last = evaluate(pool)
            _require_a_difference(base, last, adapter)
            say(f"with {adapter}: {_in_words(last)}")
            say(f"change in accuracy: {last.accuracy - base.accuracy:+.3f}")
    say(format_completions(last.rows[:ROWS_SHOWN]))
    return 0


def _in_words(evaluation: "Evaluation") -> str:
    count = int(evaluation.metrics["num_completions"])
    return (
        f"accuracy {evaluation.accuracy:.3f}, reward {evaluation.metrics['reward']:.3f}, "
        f"{evaluation.metrics['completions/mean_length']:.1f} tokens on average ({count} completions)"
    )


def _require_a_difference(base: "Evaluation", trained: "Evaluation", adapter: Path) -> None:
    """An adapter that changes no completion was not applied, or has learnt nothing: no score is reported for it."""
    if [row["completion"] for row in base.rows] == [row["completion"] for row in trained.rows]:
        raise UserError(
            f"{adapter} changes no completion: it has learnt nothing yet (no group had different rewards, or the "
            "learning rate was 0), or it is not this model's"
        )


if __name__ == "__main__":
    sys.exit(run_main(main))
