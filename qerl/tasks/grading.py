r"""Grading: is a completion's answer the right one? Pure functions of two strings.

An answer is found before it is compared. What a completion marks as its answer counts before anything else it says: the
last of \boxed{...}, `#### ...` and <answer>...</answer>. Numbers are compared exactly, as fractions: 18, 18.0, $18 and
1.8e1 are one value, 0.3333 and 1/3 are not (`numerals`).

What the graders say of 300 answers is written down, and decided by hand, in tests/data/grading_cases.tsv. Reward
functions over these are in `builtin.py`; math-verify is imported only when `math_equal` needs it, because the processes
that grade start often and must start fast.
"""

import logging
import re
from fractions import Fraction

from qerl.tasks.marks import last_boxed, last_tagged, marked_answer
from qerl.tasks.numerals import (
    Number,
    find_last_number,
    find_numbers,
    is_worked_out,
    number_text,
    one_spelling,
    read_number,
)

MAX_ANSWER = 400
"""Characters of an answer that math-verify is asked about; longer ones are compared as text."""
MAX_TEXT = 2000
"""Characters at the end of an unmarked text in which math-verify looks for an answer."""

_WRAPPERS = re.compile(
    r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mathit|mbox|boxed|fbox)\s*\{([^{}]*)\}"
)
_CHOICE = re.compile(r"\s*\(?([A-J])\)?\.?\s*")
_LEAD = re.compile(r"^\\text\s*\{[^{}]*\b(?:is|are|equals)[ :]*\}(?=.)")
_TOO_LARGE = re.compile(
    r"\^\s*\{?\s*-?\s*[0-9]{4}|\^[^^]{0,20}\^|[0-9]{4}\s*!|[!)}\]]\s*!|[0-9]{60}|\\binom|\\sum|\\prod|\\int"
    r"|[)}\]]\s*\^\s*\{?\s*[0-9]{2}.*[)}\]]\s*\^\s*\{?\s*[0-9]{2}|(?:[({[]\s*){20}|[)}\]]\s*\^\s*\{?\s*[0-9]{3}",
    re.DOTALL,
)
"""What sympy might work on for ever: powers of powers, large powers and factorials, sums and integrals."""
_UNITS = {
    unit: kind
    for kind, names in {
        "millimetre": "mm millimeter millimetre",
        "centimetre": "cm centimeter centimetre",
        "metre": "m meter metre",
        "kilometre": "km kilometer kilometre",
        "inch": "in inch inche",
        "foot": "ft foot feet",
        "yard": "yd yard",
        "mile": "mi mile",
        "gram": "g gram",
        "kilogram": "kg kilogram",
        "pound": "lb pound",
        "ounce": "oz ounce",
        "second": "s sec second",
        "minute": "min minute",
        "hour": "h hr hour",
        "day": "day",
        "week": "week",
        "month": "month",
        "year": "yr year",
        "dollar": "dollar",
        "cent": "cent",
        "litre": "l liter litre",
        "millilitre": "ml milliliter millilitre",
    }.items()
    for unit in names.split()
}


# ---- what the answer is ----


def last_number(text: str) -> Fraction | None:
    """The number that is marked as the answer, else the last one in the text; None if there is none."""
    number = _answer_number(text)
    return None if number is None else number.value


def _answer_number(text: str) -> Number | None:
    marked = marked_answer(text)
    if marked is None:
        return find_last_number(text)
    # `#### 9 * 2 = 18 (2 each)`: what follows the last equals sign, without an aside in brackets.
    result = re.split(r"(?<=\S)\s\(", marked.rpartition("=")[2])[0]
    numbers = find_numbers(result)
    return numbers[0] if numbers and all(number == numbers[0] for number in numbers) else None


def as_number(text: str) -> Fraction | None:
    """The value of a text that is one plain number (no fraction) but for currency or percent sign; otherwise None."""
    number = None if "/" in one_spelling(text) else read_number(text)
    return None if number is None else number.value


def extract_answer(completion: str, answer: str | None) -> str:
    """The part of a completion to hold against `answer`, in the answer's own form.

    Inside the last <answer>...</answer> if there is one. A numeric answer is compared with the last number, which is
    returned as the answer spells it when they are equal; otherwise as many last lines are taken as the answer has.
    """
    tagged = last_tagged(completion)
    text = completion.strip() if tagged is None else tagged
    if answer is not None and (gold := as_number(answer)) is not None:
        value = last_number(text)
        if value is None:
            return ""
        return answer if value == gold else number_text(value)
    if tagged is not None:
        return text
    num_lines = 1 if answer is None else answer.strip().count("\n") + 1
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:]) if num_lines > 1 else "".join(lines[-1:]).strip()


def voted_answer(completion: str, answer: str | None) -> str | None:
    """The answer in the one spelling under which equal answers vote together; None: no answer.

    Of `answer`, the gold one, only the form is used: where it is a number, completions vote by the value of theirs.
    """
    marked = marked_answer(completion)
    if answer is not None and as_number(answer) is not None:
        number = _answer_number(completion)
        return None if number is None else number_text(number.value)
    text = extract_answer(completion, answer) if marked is None else marked
    number = read_number(text)
    return (number_text(number.value) if number is not None else _as_text(text)) or None


# ---- is it right? ----


def last_number_equals(completion: str, answer: str) -> bool:
    """True if the number that the completion marks as its answer, or else its last number, is the answer.

    Raises ValueError when the answer is not a number: such a reward would be 0 for ever.
    """
    gold = None if as_number(answer) is None else read_number(answer)
    if gold is None:
        raise ValueError(f"the answer {answer!r} is not a number; use the reward exact or math")
    found = _answer_number(completion)
    return found is not None and found.equals(gold)


def exactly_equals(completion: str, answer: str) -> bool:
    """True if the texts are equal apart from space around them."""
    return completion.strip() == answer.strip()


def math_equal(completion: str, answer: str) -> bool:
    r"""True if the completion's answer equals the gold one as mathematics, or as words where it is words.

    The completion's answer is what it marks; without a mark, its last number where the gold answer is a number, and
    else what math-verify finds in the text. A \boxed{ that is cut off is no answer. Of numbers a value is asked for: a sum
    or product that is not worked out (12*7 for 84) is wrong. There is no time limit here: the worker process has one
    (math-verify's own needs signal.alarm).
    """
    gold = _strip(last_boxed(answer) or answer)
    found = marked_answer(completion)
    if (letter := _CHOICE.fullmatch(_unwrap(gold))) is not None:
        return (
            _chosen(completion if found is None else found, is_marked=found is not None)
            == letter[1]
        )
    if found is not None:
        return _answers_equal(_strip(found), gold)
    if re.search(r"\\(?:boxed|fbox)\s*\{", completion):
        return False
    number = read_number(gold)
    last = None if number is None else find_last_number(completion)
    if number is not None and last is not None and last.equals(number):
        return True
    text = _for_math_verify(completion[-MAX_TEXT:])
    return not _TOO_LARGE.search(text) and _verify(_parse_answer(gold), _parse(text))


def _chosen(text: str, *, is_marked: bool) -> str | None:
    """The letter of a multiple-choice answer: B, (B), (B) 15; in an unmarked text after "answer is" or alone at the end."""
    text = _unwrap(text).strip().strip("$*").strip()
    if is_marked:
        chosen = re.match(r"\(?([A-Ja-j])(?:\)|[.:]?$|[.:]\s)", text)
        return None if chosen is None else chosen[1].upper()
    stated = re.findall(r"(?i:answer)\s{0,3}(?i:is|:)?[\s:*$(]{0,5}([A-J])(?![A-Za-z'])", text)
    alone = re.search(r"(?:^|\n)[\s*(]{0,5}([A-J])[)*.\s]{0,5}$", text)
    if alone is not None:
        return alone[1]
    return stated[-1] if stated else None


def _answers_equal(found: str, gold: str) -> bool:
    if not found or not gold:
        return False
    if _as_text(found) == _as_text(gold):
        return True
    if _are_words(found, gold) or _conflict(found, gold):
        return False
    number = read_number(gold)
    if number is not None:
        result = found.rpartition("=")[2]
        if not is_worked_out(result):
            return False
        if (value := read_number(result)) is not None:
            return value.equals(number)
    if max(len(found), len(gold)) > MAX_ANSWER or _TOO_LARGE.search(found):
        return False
    return _verify(_parse_answer(gold), _parse_answer(found))


def _as_text(text: str) -> str:
    """An answer as text: no wrappers, no spacing, one case, one spelling of signs and fractions."""
    text = one_spelling(_unwrap(text)).replace("\\$", "").replace("$", "")
    return re.sub(r"\s+", "", text).rstrip(".").lower()


def _unwrap(text: str) -> str:
    """Without \\text{} and the like, innermost first."""
    for _ in range(4):
        text = _WRAPPERS.sub(r"\1", text)
    return text


def _are_words(found: str, gold: str) -> bool:
    """True if both are words, which sympy would take for products of letters: no and on, Evelyn and Nylave."""
    plain = [_unwrap(text).strip() for text in (found, gold)]
    if not all(re.fullmatch(r"[A-Za-z][A-Za-z' -]*", text) for text in plain):
        return False
    marked = any("\\text" in text for text in (found, gold))
    return marked or any(len(text) > 3 or text.lower() in ("yes", "no") for text in plain)


def _conflict(found: str, gold: str) -> bool:
    """True if both name a unit, or the base of a number, and not the same one."""
    units = [_unit(text) for text in (found, gold)]
    bases = [re.search(r"_\s*\{?\s*([0-9]+)\s*\}?$", text) for text in (found, gold)]
    return (None not in units and units[0] != units[1]) or (
        bases[0] is not None and bases[1] is not None and bases[0][1] != bases[1][1]
    )


def _unit(text: str) -> str | None:
    """The unit behind a number; None if there is none that is known."""
    words = re.findall(r"(?<![A-Za-z\\])[A-Za-z]+", _unwrap(text.replace("~", " ")))
    words = [word.lower() for word in words]
    if not re.match(r"\s*-?[0-9]", text) or len(words) != 1:
        return None
    return _UNITS.get(words[0]) or _UNITS.get(words[0].removesuffix("s"))


def _strip(text: str | None) -> str:
    """An answer without the dollars of LaTeX around it and a full stop behind it."""
    text = _LEAD.sub("", (text or "").strip())
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text.strip("$")
    return text.strip().removesuffix(".").rstrip()


def _for_math_verify(text: str) -> str:
    """What math-verify does not read: unicode minus, degree signs, LaTeX spacing, commas in braces, sines of degrees."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\$", "$")
    text = re.sub(r"(?<!\\)\\[,!;: ]", "", text)
    text = re.sub(r"\u00b0|\^\s*\{?\\circ\}?|\\degree", r"^\\circ ", text)
    text = re.sub(r"([0-9]{0,9})\.([0-9]{0,9})\\overline\{([0-9]{1,9})\}", _repeating, text)
    angle = r"(\\(?:sin|cos|tan|cot|sec|csc))\s*\(?\s*([0-9]{1,9})\s*\^\\circ\s*\)?"
    return re.sub(angle, r"\1(\\frac{\2\\pi}{180})", text)


def _repeating(found: re.Match[str]) -> str:
    """0.1\\overline{6} as a fraction: 16 - 1 over 90."""
    whole, once, cycle = found.groups()
    top = int(f"{whole}{once}{cycle}") - int(f"{whole}{once}" or 0)
    return rf"\frac{{{top}}}{{{'9' * len(cycle)}{'0' * len(once)}}}"


def _parse_answer(text: str) -> list:
    return _parse("\\boxed{" + _for_math_verify(text).strip("$") + "}")


def _parse(text: str) -> list:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  (None is documented)


def _verify(gold: list, found: list) -> bool:
    from math_verify import verify

    return bool(gold and found) and verify(
        gold, found, timeout_seconds=None, allow_set_relation_comp=True
    )
