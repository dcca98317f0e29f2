"""Grading: is a completion's answer the right one? Pure functions of two strings.

An answer is found before it is compared, and what counts as "the answer" is said by each function's name: the last
number of the text, the content of the last \\boxed{}, the whole text, the last line. Numbers are compared exactly, as
decimals: 18, 18.0, $18 and 1.8e1 are one value, 0.3333 and 1/3 are not.

Reward functions over these are in `builtin.py`; math-verify is imported only when `math_equal` is called, because the
processes that grade start often and must start fast.
"""

import re
from decimal import Decimal

_LATEX_SPACING = re.compile(r"\\[,!;: ]")
_NUMBER = re.compile(
    r"""
    (?P<sign> (?<![\w)\]}.]) - )?      # a minus after a letter, digit or bracket subtracts; it is not a sign
    \$? (?P<inner_sign> (?<=\$) - )?
    (?P<digits>
        [0-9]{1,3} (?: ,[0-9]{3} )+ (?![0-9]) (?: \.[0-9]+ )?     # 1,800.50
      | [0-9]+ (?: \.[0-9]+ )?                                     # 18 or 18.0
      | (?<![0-9]) \.[0-9]+                                        # .5
    )
    (?P<exponent> [eE][+-]?[0-9]{1,3} (?![0-9]) )?
    """,
    re.VERBOSE,
)


def normalize_number_text(text: str) -> str:
    """One spelling for what numbers are written with: ASCII minus, no LaTeX spacing, no `{,}` and `\\$`."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\$", "$")
    return _LATEX_SPACING.sub("", text)


def last_number(text: str) -> Decimal | None:
    """The last number written in `text`, or None. `1,800`, `$18`, `-$18`, `18.` and `1e3` are understood."""
    matches = list(_NUMBER.finditer(normalize_number_text(text)))
    if not matches:
        return None
    match = matches[-1]
    digits = match["digits"].replace(",", "") + (match["exponent"] or "")
    value = Decimal(digits)
    return -value if match["sign"] or match["inner_sign"] else value


def as_number(text: str) -> Decimal | None:
    """The value of a text that is one number and nothing else but a currency or percent sign; otherwise None."""
    text = normalize_number_text(text).strip()
    match = _NUMBER.match(text)
    if match is None or text[match.end() :].strip() not in ("", "%", "."):
        return None
    return last_number(text)


def last_number_equals(completion: str, answer: str) -> bool:
    """True if the last number of the completion is the answer.

    Raises ValueError when the answer is not a number: such a reward would be 0 for ever.
    """
    gold = as_number(answer)
    if gold is None:
        raise ValueError(f"the answer {answer!r} is not a number; use the reward exact or math")
    return last_number(completion) == gold


def exactly_equals(completion: str, answer: str) -> bool:
    """True if the texts are equal apart from space around them."""
    return completion.strip() == answer.strip()


def last_boxed(text: str) -> str | None:
    """The content of the last whole \\boxed{...} or \\fbox{...}, braces balanced; None if there is none."""
    content = None
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        end = _closing_brace(text, match.end())
        if end is not None:
            content = text[match.end() : end]
    return content


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace that was opened just before `start` closes. Escaped braces are text."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return start + match.start()
    return None


def math_equal(completion: str, answer: str) -> bool:
    """True if math-verify finds the completion's answer equal to the gold one.

    The completion's answer is its last \\boxed{}; without one, what math-verify finds in the text, or its last number.
    There is no time limit here: the worker process has one (math-verify's own needs signal.alarm).
    """
    from math_verify import verify

    gold = _parse_answer(answer)
    boxed = last_boxed(completion)
    if boxed is not None:
        return bool(boxed.strip()) and verify(gold, _parse_answer(boxed), timeout_seconds=None)
    if as_number(answer) is not None and last_number_equals(completion, answer):
        return True
    return verify(gold, _parse(normalize_number_text(completion)), timeout_seconds=None)


def _parse_answer(text: str) -> list:
    """Parse a text that is all answer, bare or inside $...$ or \\boxed{}."""
    text = normalize_number_text(text.strip())
    text = last_boxed(text) or text
    return _parse("\\boxed{" + text.strip("$") + "}")


def _parse(text: str) -> list:
    from math_verify import parse

    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  (None is documented)


def extract_answer(completion: str, answer: str | None) -> str:
    """The part of a completion to hold against `answer`, in the answer's own form.

    Inside the last <answer>...</answer> if there is one. A numeric answer is compared with the last number, which is
    returned as the answer spells it when they are equal; otherwise as many last lines are taken as the answer has.
    """
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    text = tagged[-1].strip() if tagged else completion.strip()
    if answer is not None and (gold := as_number(answer)) is not None:
        value = last_number(text)
        if value is None:
            return ""
        return answer if value == gold else format(value, "f")
    if tagged:
        return text
    num_lines = 1 if answer is None else answer.strip().count("\n") + 1
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:]) if num_lines > 1 else "".join(lines[-1:]).strip()


def voted_answer(completion: str, answer: str | None) -> str | None:
    """placeholder"""
    return extract_answer(completion, answer) or None
