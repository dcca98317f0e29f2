"""What figures of completions and metrics mean in words: each cause of a flat reward is called by its name."""

import pytest

from qerl.diagnosis.figures import Figures, describe_figures, figures_of
from qerl.diagnosis.findings import (
    Finding,
    findings_of_metrics,
    findings_of_samples,
    flat_reward_line,
)

LIMIT = 100


def rows(
    groups: list[list[float | None]],
    *,
    text: str = r"\boxed{1}",
    cut: bool = False,
    term: str = "boxed",
    **more: list[float],
) -> list[dict]:
    """Completions rows of groups with these rewards; `more` are further terms, one value a completion."""
    flat = [(number, value) for number, group in enumerate(groups) for value in group]
    return [
        {
            "problem_id": f"p{number}",
            "version": 0,
            "completion": text,
            "answer": "1",
            f"reward/{term}": value,
            **{f"reward/{name}": values[place] for name, values in more.items()},
            "reward": value,
            "num_tokens": LIMIT if cut else 10,
            "finish_reason": "length" if cut else "stop",
        }
        for place, (number, value) in enumerate(flat)
    ]


def first(samples: list[dict]) -> Finding:
    return findings_of_samples(figures_of(samples), LIMIT)[0]


def test_figures_by_hand() -> None:
    figures = figures_of(rows([[1.0, 0.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4, [None, 0.0, 0.0, 0.0]]))
    assert figures.num_groups == 4 and figures.group_size == 4
    assert figures.share_with_spread == 0.25
    assert (figures.share_all_right, figures.share_all_wrong) == (0.25, 0.5)
    assert figures.pass_at_1 == 6 / 16 and figures.pass_at_g == 0.5
    term = figures.terms["boxed"]
    assert (term.mean, term.low, term.high, term.share_none) == (0.4, 0.0, 1.0, 1 / 16)
    assert "pass@1 0.375, pass@4 0.500" in "\n".join(describe_figures(figures))


def test_the_same_problem_in_two_steps_is_two_groups() -> None:
    again = [{**row, "version": 1} for row in rows([[1.0, 1.0]])]
    figures = figures_of([*rows([[0.0, 0.0]]), *again])
    assert figures.num_groups == 2 and figures.share_with_spread == 0


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (rows([[1.0, 1.0]] * 3), "too easy"),
        (rows([[0.0, 0.0]] * 3), "too hard"),
        (rows([[0.0, 0.0]] * 3, cut=True), "raise max_completion_length"),
        (rows([[0.0, 0.0]] * 3, text="It is 1."), "finds no answer"),
        (rows([[None, None]] * 3), "see rewards.log"),
        (rows([[0.1 + 0.2, 0.3]] * 3), "too hard"),
    ],
)
def test_groups_without_spread_stop_with_their_cause(samples: list[dict], words: str) -> None:
    finding = first(samples)
    assert finding.kind == "stop" and words in finding.advice


def test_groups_with_spread_are_fine() -> None:
    assert first(rows([[1.0, 0.0]] * 3)).kind == "fine"
    assert first(rows([[1.0, 0.0], *[[0.0, 0.0]] * 9])).text.startswith("only 10%")


def test_a_constant_term_beside_another_is_named() -> None:
    samples = rows([[1.0, 0.0]] * 2, tags=[0.0] * 4)
    texts = [finding.text for finding in findings_of_samples(figures_of(samples), LIMIT)]
    assert "reward tags is 0 for every completion" in texts


def line(step: int, reward: float, zero_std: float = 0.0, **more: float | None) -> dict:
    metrics = {"reward": reward, "frac_reward_zero_std": zero_std, "grad_norm": 0.1, **more}
    return {"step": step, **{f"train/{name}": value for name, value in metrics.items()}}


def texts_of(lines: list[dict]) -> dict[str, str]:
    return {finding.text: finding.kind for finding in findings_of_metrics(lines)}


def test_metrics_in_words() -> None:
    rising = [line(i, 0.1 * i) for i in range(1, 9)]
    assert any("it rises" in text for text in texts_of(rising))
    assert any("it falls" in text for text in texts_of(rising[::-1]))
    flat = [line(i, 0.5 + 0.1 * (-1) ** i) for i in range(1, 9)]
    assert any("no change beyond" in text for text in texts_of(flat))
    assert (
        texts_of([line(1, 0.0, grad_norm=0.0)])["the gradient norm is 0: no step changes anything"]
        == "stop"
    )
    for ratio, kind in ((1.001, "fine"), (1.03, "warning"), (1.2, "stop")):
        kinds = texts_of([line(1, 0.0, **{"sampling/token_mult_prob_error": ratio})])
        assert next(k for text, k in kinds.items() if "exp|delta" in text) == kind
    noisy = line(1, 0.0, **{"sampling/token_mult_prob_error": 1.2, "noise/sigma": 0.01})
    assert next(k for text, k in texts_of([noisy]).items() if "exp|delta" in text) == "warning"
    moving = [line(1, 0.0, adapter_norm=1.0), line(2, 0.0, adapter_norm=1.5)]
    assert texts_of(moving)["norm of the adapter 1 after the first step, 1.5 now"] == "fine"
    still = texts_of([line(1, 0.0, adapter_norm=1.0), line(2, 0.0, adapter_norm=1.0)])
    assert still["norm of the adapter 1 after the first step, 1 now"] == "stop"
    entropy = [line(1, 0.0, entropy=1.0), line(2, 0.0, entropy=0.05)]
    assert any("entropy fell" in text for text in texts_of(entropy))
    assert any(
        "lost to failures" in text for text in texts_of([line(1, 0.0, **{"rewards/failures": 3})])
    )
    assert findings_of_metrics([{"step": 0, "eval/accuracy": 0.1}]) == []
    assert findings_of_metrics([line(1, 0.0), {**line(2, 0.0), "train/reward": None}])


def test_one_line_when_nothing_was_learnt() -> None:
    wrong, mixed = rows([[0.0, 0.0]] * 3), rows([[1.0, 0.0]] * 3)
    stuck = [line(i, 0.0, 1.0) for i in range(1, 6)]
    text = flat_reward_line(stuck, wrong, 5, LIMIT)
    assert "0% of the groups had different rewards" in text and "too hard" in text
    assert "0% cut" in text and "gradient norm 0.1" in text
    seen = {"adapter_norm": 3.25, "sampling/token_mult_prob_error": 1.0012}
    text = flat_reward_line(
        [line(i, 0.0, 1.0, **seen) for i in range(5)], rows([[0.0] * 2], tags=[0.0] * 2), 5, LIMIT
    )
    assert "constant: " in text and "tags" in text
    assert text.endswith("adapter norm 3.25, agreement 1.001")
    assert flat_reward_line(stuck[:4], wrong, 5, LIMIT) is None
    flat = [line(i, 0.5 + 0.1 * (-1) ** i) for i in range(1, 11)]
    assert "flat for 10 steps" in flat_reward_line(flat, mixed, 5, LIMIT)
    assert flat_reward_line(flat[:5], mixed, 5, LIMIT) is None
    rising = [line(i, 0.1 * i) for i in range(1, 11)]
    assert flat_reward_line(rising, mixed, 5, LIMIT) is None


def test_figures_do_not_depend_on_who_asks() -> None:
    assert isinstance(figures_of(rows([[1.0]])), Figures)
    assert figures_of(rows([[2.0, 0.5]], term="mine"), right_at=0.5).pass_at_1 == 1.0
