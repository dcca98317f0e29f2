"""Graders against answers decided by hand, and against text that nobody would write.

tests/data/grading_cases.tsv holds the table: what a careful person says of an answer. In it ⏎ is a line's end, ⍽ a
no-break space and ˽ a narrow one.
"""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qerl.tasks.builtin import answer_text, boxed_format, reasoning_gym
from qerl.tasks.grading import (
    as_number,
    exactly_equals,
    extract_answer,
    last_boxed,
    last_number,
    last_number_equals,
    math_equal,
    voted_answer,
)
from qerl.tasks.numerals import number_text, read_number

TABLE = Path(__file__).parent / "data" / "grading_cases.tsv"
GRADERS = {"last_number": last_number_equals, "exact": exactly_equals, "math": math_equal}
CHARACTERS = str.maketrans({"⏎": "\n", "⍽": "\u00a0", "˽": "\u202f"})


def cases() -> list[tuple[str, str, str, bool, str]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    return [
        (grader, gold.translate(CHARACTERS), text.translate(CHARACTERS), verdict == "yes", why)
        for grader, gold, text, verdict, why in rows
    ]


@pytest.mark.parametrize("grader", GRADERS)
def test_every_case_of_the_table(grader: str) -> None:
    chosen = [case for case in cases() if case[0] == grader]
    wrong = [
        f"{text!r} for {gold!r} is {'right' if right else 'wrong'}: {why}"
        for _, gold, text, right, why in chosen
        if GRADERS[grader](text, gold) is not right
    ]
    assert chosen and not wrong, "\n".join(wrong)


def test_the_table_is_large_and_says_both_yes_and_no() -> None:
    table = cases()
    assert len(table) > 300
    assert len({case[:3] for case in table}) == len(table)
    verdicts = Counter((grader, right) for grader, _, _, right, _ in table)
    assert all(verdicts[grader, right] >= 3 for grader in GRADERS for right in (True, False))
    assert all(why for *_, why in table)


# ---- the parts ----


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", "18"),
        ("1{,}800.5", "3601/2"),
        ("1/3", "1/3"),
        ("-1 1/2", "-3/2"),
        ("1e-3", "1/1000"),
        ("1e999", f"1{'0' * 999}"),
        ("x-18", "18"),
        ("#### 9 * 2 = 18 (2 each)", "18"),
    ],
)
def test_last_number(text: str, value: str) -> None:
    assert last_number(text) == Fraction(value)


@pytest.mark.parametrize("text", ["", " ", "none", "-", "$", ",", "1/0", "9" * 5000, "1:2", "3²+1"])
def test_no_number(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [("18", "18"), ("-1/2", "-0.5"), ("1/3", "1/3"), ("1/1000", "0.001"), ("0", "0")],
)
def test_number_text(value: str, text: str) -> None:
    assert number_text(Fraction(value)) == text
    number = read_number(text)
    assert number is not None and number.value == Fraction(value)


@pytest.mark.parametrize("answer", ["", "yes", "1/2", "3 apples", "x = 3", r"\frac{1}{2}"])
def test_an_answer_that_is_no_number_is_loud(answer: str) -> None:
    assert as_number(answer) is None
    with pytest.raises(ValueError, match="not a number"):
        last_number_equals("3", answer)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{18}", "18"),
        (r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"{{ \boxed{5} }}}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed 7", None),
        ("boxed{8}", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("completion", "answer", "extracted"),
    [
        ("I think it is 1,800.", "1800", "1800"),
        ("18.0", "18", "18"),
        ("17", "18", "17"),
        ("1e3", "18", "1000"),
        ("1/3", "18", "1/3"),
        ("nothing", "18", ""),
        ("", "18", ""),
        ("<answer>18</answer> or 19", "18", "18"),
        ("<answer>a</answer> <answer>b\nc</answer>", "b", "b\nc"),
        ("I see.\n\nno\nyes\n\n", "yes", "yes"),
        ("grid:\n1 2\n3 4\n", "1 2\n3 4", "1 2\n3 4"),
        ("3/4", "6/8", "3/4"),  # a family may ask for lowest terms
        ("red, blue", None, "red, blue"),
        ("", "yes", ""),
    ],
)
def test_extract_answer(completion: str, answer: str | None, extracted: str) -> None:
    assert extract_answer(completion, answer) == extracted


@pytest.mark.parametrize(
    ("one", "other", "gold", "together"),
    [
        ("It is 18.", "#### 18.0", "17", True),
        ("1,800", "$1800", "3", True),
        ("18", "19", "18", False),
        (r"\boxed{\frac{1}{2}}", r"\boxed{1/2}", "x", True),
        (r"\boxed{0.5}", r"\boxed{\dfrac12}", "x", True),
        (r"\boxed{\text{Evelyn}}", r"\boxed{evelyn}", "Evelyn", True),
        (r"\boxed{x^2}", r"\boxed{x^3}", "x", False),
        (r"\boxed{(1, 2)}", r"\boxed{(1,2)}", "(1,2)", True),
        ("so\nyes", "no\nyes.", "yes", True),
    ],
)
def test_equal_answers_vote_together(one: str, other: str, gold: str, together: bool) -> None:
    votes = [voted_answer(text, gold) for text in (one, other)]
    assert None not in votes
    assert (votes[0] == votes[1]) is together


@pytest.mark.parametrize("gold", ["18", "yes", None])
def test_no_answer_does_not_vote(gold: str | None) -> None:
    assert voted_answer("", gold) is None
    assert voted_answer(r"\boxed{}", gold) is None


def test_boxed_format() -> None:
    assert boxed_format([r"\boxed{1}", r"\boxed{ }", "1", ""]) == [1.0, 0.0, 0.0, 0.0]


def test_reasoning_gym_scores_by_the_family() -> None:
    entry = {"question": "9 + 9 =", "answer": "18", "metadata": {"source_dataset": "chain_sum"}}
    completions = ["9 + 9 is 18.", "18.0", "It is 17", "", [{"role": "assistant", "content": "18"}]]
    n = len(completions)
    scores = reasoning_gym(
        completions, [entry] * n, ["chain_sum"] * n, [{"min_terms": 2}] * n, [None] * n
    )
    assert scores == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_answers_of_other_types_become_text() -> None:
    assert [answer_text(a) for a in (None, "a", 18, 1.5, [1, "b"])] == [
        None, "a", "18", "1.5", '[1, "b"]',
    ]  # fmt: skip


# ---- never raises, never hangs ----

PIECES = (  # noqa: SIM905
    r"\boxed{ } { \frac {1} {2} x y n ^ 2 3 10 99 999 ( ) [ ] , = + - * / \sqrt \text{ or ! % \% $ \pi \infty \cup \pm "
    r"\begin{pmatrix} \end{pmatrix} & \\ \sin \log \{ \} . 1,800 #### <answer> </answer> A B e i : < > \le \int \sum _ | "
    r"− ½ ² 1e9 ' \left \right \cdot \times ^\circ \overline{3} answer is 0"
).split()
GOLDS = ("18", "1/2", "(1,2)", "x^2", "B", r"\{1,2\}", "[0,1)", "yes", "x=5", "50\\%", "")
TOO_MUCH = (
    r"\boxed{9^{9^{9^{9}}}}", r"\boxed{(10^{9})!}", r"\boxed{(x+y)^{999}}", r"\boxed{10^{999999}}", r"\boxed{((9!)!)!}",
    "\\boxed{" * 4000, "<answer>" * 4000, "####" * 4000, "1," * 10000, "1/" * 10000, "1" * 50000, "1 1/2 " * 3000,
    r"\boxed{" + "1+" * 5000 + "1}", r"\boxed{" + "(" * 300 + "1" + ")" * 300 + "}", "{" * 20000, "^" * 20000,
)  # fmt: skip


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def grade_every_way(completion: str, gold: str) -> None:
    assert isinstance(math_equal(completion, gold), bool)
    assert isinstance(exactly_equals(completion, gold), bool)
    assert isinstance(extract_answer(completion, gold), str)
    assert voted_answer(completion, gold) != ""
    if as_number(gold) is not None:
        assert isinstance(last_number_equals(completion, gold), bool)


@given(
    st.lists(st.sampled_from(PIECES), max_size=16).map("".join),
    st.sampled_from(GOLDS),
    st.booleans(),
)
@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
def test_pieces_of_mathematics_in_any_order(text: str, gold: str, boxed: bool) -> None:
    with time_limit(10):
        grade_every_way(rf"\boxed{{{text}}}" if boxed else text, gold)


@given(st.text(max_size=60), st.text(max_size=20))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_text(completion: str, gold: str) -> None:
    with time_limit(10):
        grade_every_way(completion, gold)


@pytest.mark.parametrize("completion", TOO_MUCH, ids=lambda text: text[:12])
def test_what_would_take_for_ever_is_answered_at_once(completion: str) -> None:
    for gold in ("18", "x+1"):
        with time_limit(5):
            grade_every_way(completion, gold)
