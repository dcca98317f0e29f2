"""Find out before training whether it can work: the prompt, the rewards, and a dry sample of the model.

    python -m qerl.check --model qwen2.5-7b --task gsm8k          the same arguments as qerl.train
    python -m qerl.check --model quickstart --no-sample           prompt and rewards only: no weights are loaded

Shown are one whole prompt as the model will see it; what the rewards make of gold answers, of empty ones and of those of
other problems; and, of a few sampled groups, each term's spread, truncation, pass@1, pass@G and how many groups are all
right or all wrong. It ends in a verdict. Nothing is written.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from qerl.errors import UserError
from qerl.settings.cli import ExtraFlag, parse_config, run_main

if TYPE_CHECKING:
    from qerl.diagnosis.findings import Finding
    from qerl.run import Preparation
    from qerl.tasks.pool import RewardPool

PROBLEMS = ExtraFlag("check_problems", "Problems that are sampled.", takes_value=True, default="16")
GOLDS = ExtraFlag("check_golds", "Gold answers that are scored.", takes_value=True, default="64")
NO_SAMPLE = ExtraFlag(
    "no_sample", "Check prompt and rewards only; the model's weights are not loaded."
)
EXAMPLES = (
    "python -m qerl.check --model quickstart",
    "python -m qerl.check --model qwen2.5-7b --task math --task.levels 3,4,5 --check-problems 32",
    "python -m qerl.check --model qwen3-8b --task.path data.jsonl --reward-funcs rewards.py:f --no-sample",
)


def main(argv: list[str] | None = None) -> int:
    """Parse, prepare, check, print. Returns 1 if nothing would be learnt, else 0."""
    config, options = parse_config(
        argv,
        prog="python -m qerl.check",
        description="Check prompt, rewards and a dry sample before training, with the arguments of qerl.train.",
        extra_flags=(PROBLEMS, GOLDS, NO_SAMPLE),
        examples=EXAMPLES,
    )
    num_problems = _size(PROBLEMS, options.check_problems)
    num_golds = _size(GOLDS, options.check_golds)
    from qerl.metrics import say
    from qerl.run import prepare
    from qerl.summary import introduce
    from qerl.tasks.pool import open_pool

    prepared = prepare(config)
    introduce(prepared)
    findings: list[Finding] = []
    # Failures are findings here, however many: nothing is trained on.
    limits = config.reward.model_copy(update={"max_failure_share": 1.0})
    with open_pool(prepared.data.rewards, limits) as pool:
        findings += _check_gold(prepared, pool, num_golds)
        if not options.no_sample:
            findings += _check_sample(prepared, pool, num_problems)
    findings += [
        _warning(note.removeprefix("warning: "))
        for note in prepared.data.notes
        if note.startswith("warning: ")
    ]
    say("\n" + "\n".join(_verdict(findings, sampled=not options.no_sample)))
    return int(any(finding.kind == "stop" for finding in findings))


def _check_gold(prepared: "Preparation", pool: "RewardPool", num_golds: int) -> "list[Finding]":
    from qerl.diagnosis.gold_check import describe_gold, findings_of_gold, score_gold
    from qerl.metrics import say

    data = prepared.data
    scores = score_gold(
        data.train,
        _spread_out(len(data.train.problems), num_golds),
        data.rewards,
        data.task.answer_format,
        pool,
        cast(int, prepared.sampling.eos_token_ids[0]),
    )
    if scores is None:
        say("the data have no answers: gold answers cannot be checked")
        return []
    say(
        f"rewards of {len(scores.problems)} gold answers, of empty ones, of other problems' answers:"
    )
    say("\n".join(describe_gold(scores)))
    return findings_of_gold(scores, data.rewards)


def _check_sample(
    prepared: "Preparation", pool: "RewardPool", num_problems: int
) -> "list[Finding]":
    from qerl.build import open_inference
    from qerl.diagnosis.figures import describe_figures, figures_of
    from qerl.diagnosis.findings import findings_of_samples
    from qerl.evaluation.policy import correctness_reward
    from qerl.metrics import format_completions, say
    from qerl.rollout import completion_rows, generate, score
    from qerl.tasks.rewards import total_rewards

    config, data = prepared.config, prepared.data
    inference = open_inference(config, prepared.source, prepared.tokenizer)
    inference.engine.sync(0, None)
    indices = _spread_out(len(data.train.problems), num_problems)
    g = config.rollout.num_generations
    say(
        f"\nsampling {len(indices)} problems x {g} completions from {config.model} ({config.quant}) ..."
    )
    batch = generate(
        inference.engine,
        prepared.tokenizer,
        data.train,
        indices,
        prepared.sampling,
        g,
        ("check", config.seed),
    )
    inference.engine.close()
    results = score(pool, batch)
    totals = total_rewards(results, data.rewards)
    rows = completion_rows(batch, prepared.tokenizer, results, totals, None)
    figures = figures_of(rows, correctness_reward(data.rewards, data.task))
    say("\n".join(describe_figures(figures)))
    shown = sorted(rows, key=lambda row: -(cast(float | None, row["reward"]) or 0.0))
    say(format_completions([shown[0], shown[-1]]))
    return findings_of_samples(figures, config.rollout.max_completion_length)


def _verdict(findings: "Sequence[Finding]", sampled: bool) -> list[str]:
    """The findings, gravest first, and a sentence that sums them up."""
    order = ("stop", "warning", "fine")
    lines = [f.line() for f in sorted(findings, key=lambda finding: order.index(finding.kind))]
    kinds = {finding.kind for finding in findings}
    if "stop" in kinds:
        word = "do not train like this yet: see [stop]"
    elif "warning" in kinds:
        word = "it can be trained; mend the warnings first if you can"
    elif sampled:
        word = "ready to train"
    else:
        word = "prompt and rewards fit together; whether the model can learn, a check with samples would show"
    return [*lines, f"verdict: {word}"]


def _warning(text: str) -> "Finding":
    from qerl.diagnosis.findings import Finding

    return Finding("warning", text)


def _spread_out(num: int, wanted: int) -> list[int]:
    """At most `wanted` of `num` indices, evenly over the data: its order may mean something."""
    count = min(num, wanted)
    return [place * num // count for place in range(count)]


def _size(flag: ExtraFlag, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise UserError(f"{flag.written} {text}: give a whole number, 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(run_main(main))
