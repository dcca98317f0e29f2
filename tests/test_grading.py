"""Graders against answers checked by hand: what people and models really write, empty texts included."""

from decimal import Decimal

import pytest

from qerl.tasks.builtin import answer_text, boxed_format, reasoning_gym
from qerl.tasks.grading import (
    as_number,
    exactly_equals,
    extract_answer,
    last_boxed,
    last_number,
    last_number_equals,
    math_equal,
)

LAST_NUMBER = [
    # as it is written
    ("18", "18"),
    ("18.0", "18"),
    ("018", "18"),
    ("18.50", "18.5"),
    (".5", "0.5"),
    ("0.5", ".5"),
    ("1,800", "1800"),
    ("1,234,567.25", "1234567.25"),
    ("1{,}800", "1800"),
    (r"$1\,800$", "1800"),
    ("1e3", "1000"),
    ("1.5e-3", "0.0015"),
    # signs
    ("-18", "-18"),
    ("\u221218", "-18"),
    ("= -18", "-18"),
    ("x=-18", "-18"),
    ("(-18)", "-18"),
    ("**-18**", "-18"),
    ("20-18", "18"),
    ("x-18", "18"),
    ("(20)-18", "18"),
    ("- 18", "18"),
    # money, percent, units
    ("$18", "18"),
    ("$18.00", "18"),
    ("-$18", "-18"),
    ("$-18", "-18"),
    (r"\$18", "18"),
    ("18$", "18"),
    ("18%", "18"),
    ("\u20ac18", "18"),
    ("18kg", "18"),
    ("18 apples.", "18"),
    # inside text
    ("#### 18", "18"),
    ("The answer is 18.", "18"),
    ("The answer is 18!\n", "18"),
    ("**18**", "18"),
    (r"\boxed{18}", "18"),
    ("5 + 13 = 18", "18"),
    ("$5 + $13 = $18 in total", "18"),
    ("First 7, then 8, so 18", "18"),
    ("18/2 = 9", "9"),
    ("1/2", "2"),
    ("3-5", "5"),
    ("1,80", "80"),
    ("10, 20", "20"),
    ("10,20", "20"),
    ("at 10:30", "30"),
    ("12345678901234567890", "12345678901234567890"),
]


@pytest.mark.parametrize(("text", "value"), LAST_NUMBER)
def test_last_number(text: str, value: str) -> None:
    assert last_number(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", " ", "none", "eighteen", "-", "$", ",", "..."])
def test_no_number(text: str) -> None:
    assert last_number(text) is None


LAST_NUMBER_EQUALS = [
    ("18", "18", True),
    ("the total is $18.00.", "18", True),
    ("18", "18.0", True),
    ("1800", "1,800", True),
    ("1,800", "$1800", True),
    ("\u22123", "-3", True),
    ("50", "50%", True),
    ("", "18", False),
    ("I do not know", "18", False),
    ("1", "18", False),
    ("8", "18", False),
    ("180", "18", False),
    ("-18", "18", False),
    ("18.01", "18", False),
    ("18 or 19", "18", False),
    ("1000001", "1000000", False),
    ("0.1", "0.10000000000000001", False),
]


@pytest.mark.parametrize(("completion", "answer", "expected"), LAST_NUMBER_EQUALS)
def test_last_number_equals(completion: str, answer: str, expected: bool) -> None:
    assert last_number_equals(completion, answer) is expected


@pytest.mark.parametrize("answer", ["", "yes", "1/2", "3 apples", "x = 3", r"\frac{1}{2}"])
def test_an_answer_that_is_no_number_is_loud(answer: str) -> None:
    assert as_number(answer) is None
    with pytest.raises(ValueError, match="not a number"):
        last_number_equals("3", answer)


EXACT = [
    ("yes", "yes", True),
    (" yes\n", "yes", True),
    ("321", " 321 ", True),
    ("Yes", "yes", False),
    ("yes.", "yes", False),
    ("", "yes", False),
    ("18.0", "18", False),
]


@pytest.mark.parametrize(("completion", "answer", "expected"), EXACT)
def test_exactly_equals(completion: str, answer: str, expected: bool) -> None:
    assert exactly_equals(completion, answer) is expected


BOXED = [
    (r"\boxed{18}", "18"),
    (r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}"),
    (r"\boxed{1} no, \boxed{2}", "2"),
    (r"\fbox{3}", "3"),
    (r"\boxed {4}", "4"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
    (r"\boxed{5} and \boxed{6", "5"),
    (r"\boxed{}", ""),
    (r"\boxed 7", None),
    ("boxed{8}", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "content"), BOXED)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


MATH = [
    (r"\boxed{18}", "18", True),
    (r"\boxed{18.0}", "18", True),
    (r"\boxed{\$18}", "18", True),
    (r"\boxed{18 \text{ dollars}}", "18", True),
    (r"\boxed{1,800}", "1800", True),
    (r"\boxed{\frac{1}{2}}", "1/2", True),
    (r"\boxed{0.5}", r"\frac{1}{2}", True),
    (r"\boxed{\frac12}", r"$\frac{1}{2}$", True),
    (r"\boxed{x=5}", "5", True),
    (r"\boxed{2\sqrt{3}}", r"\boxed{\sqrt{12}}", True),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}", True),
    (r"so $\frac{3}{4}$ it is", "0.75", True),
    ("the answer is 1/2", "0.5", True),
    ("#### 18", "18", True),
    ("It costs $5 + $13 = $18.", "18", True),
    ("\u22123 units", "-3", True),
    (r"\boxed{17}", "18", False),
    (r"18, or rather \boxed{17}", "18", False),
    (r"\boxed{}", "18", False),
    (r"\boxed{} 18", "18", False),
    (r"\boxed{\frac{1}{3}}", "0.3333", False),
    (r"\boxed{-18}", "18", False),
    ("", "18", False),
    ("no number at all", "18", False),
    ("eighteen", "18", False),
]


@pytest.mark.parametrize(("completion", "answer", "expected"), MATH)
def test_math_equal(completion: str, answer: str, expected: bool) -> None:
    assert math_equal(completion, answer) is expected


EXTRACTED = [
    ("I think it is 1,800.", "1800", "1800"),
    ("18.0", "18", "18"),
    ("17", "18", "17"),
    ("1e3", "18", "1000"),
    ("nothing", "18", ""),
    ("", "18", ""),
    ("<answer>18</answer> or 19", "18", "18"),
    ("<answer>a</answer> <answer>b\nc</answer>", "b", "b\nc"),
    ("I see.\n\nno\nyes\n\n", "yes", "yes"),
    ("grid:\n1 2\n3 4\n", "1 2\n3 4", "1 2\n3 4"),
    ("red, blue", None, "red, blue"),
    ("", "yes", ""),
]


@pytest.mark.parametrize(("completion", "answer", "extracted"), EXTRACTED)
def test_extract_answer(completion: str, answer: str | None, extracted: str) -> None:
    assert extract_answer(completion, answer) == extracted


def test_boxed_format() -> None:
    assert boxed_format([r"\boxed{1}", r"\boxed{ }", "1", ""]) == [1.0, 0.0, 0.0, 0.0]


def test_reasoning_gym_scores_by_the_family() -> None:
    entry = {"question": "9 + 9 =", "answer": "18", "metadata": {"source_dataset": "chain_sum"}}
    completions = ["9 + 9 is 18.", "18.0", "It is 17", "", [{"role": "assistant", "content": "18"}]]
    n = len(completions)
    scores = reasoning_gym(completions, [entry] * n, ["chain_sum"] * n, [{"min_terms": 2}] * n)
    assert scores == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_answers_of_other_types_become_text() -> None:
    assert [answer_text(a) for a in (None, "a", 18, 1.5, [1, "b"])] == [
        None, "a", "18", "1.5", '[1, "b"]',
    ]  # fmt: skip
