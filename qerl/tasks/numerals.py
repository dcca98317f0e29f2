"""Numbers as people and models write them: one spelling, then exact values. No libraries, linear time.

What counts as ONE number: 18, 18.0, .5, 1,800, 1,00,000, 1e3, 1.8 x 10^3, 1/2, 1 1/2, $18, 18 %, each with a sign. What
is written as something to work out (20-18, 2*9, 18/2) or as several numbers in one word (10:30, 3:2, 05/12/2024, (10,20))
is not one number, and neither its end nor its beginning is taken for it.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400
"""Longer runs of digits are no number that somebody means; int() refuses them from 4300 on."""

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00d7\u2217\u00b7\u22c5", "*"),
        **dict.fromkeys("\u00b0\u00ba", " "),
        "\u2044": "/",
        "\uff05": "%",
        "\uff0c": ",",
        "\uff0e": ".",
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")


def _compiled(*rewrites: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rewrites)


_SPELLINGS = _compiled(
    (r"\\left(?![a-z])|\\right(?![a-z])", ""),
    (r"(?<!\\)\\[,!;: ]|~", ""),  # LaTeX's thin spaces stand between thousands
    (r"\{,\}", ","),
    (r"\\([$%])", r"\1"),
    (r"(?<=[0-9])[\u00a0\u202f\u2009](?=[0-9]{3}(?![0-9]))", ""),
    (r"[\u00a0\u202f\u2009]", " "),
    (r"\\(?:times|cdot|ast)(?![a-z])", "*"),
    (r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\s?\{([^{}]{0,200})\}", r" \1 "),
    (r"\^\s?(?:\{\\circ\}|\\circ)", " "),
    (r"\\[dt]?frac\s?\{\s?(-?[0-9]+)\s?\}\s?\{\s?([0-9]+)\s?\}", r" \1/\2 "),
    (r"\\[dt]?frac\s?([0-9])\s?([0-9])", r" \1/\2 "),
    (r"-[ ]{1,2}(?=[0-9]+/[0-9])", "-"),  # the sign of a fraction that was just rewritten
    (r"\^\s?\{\s?([-+]?[0-9]+)\s?\}", r"^\1"),
)
"""Ways to write the same thing"""
_NOT_NUMBERS = _compiled(
    (r"(?<=[0-9])[ \t]?x[ \t]?(?=[0-9])", "*"),
    (r"(?<=[A-Za-z]) {0,2}\^[-+]?[0-9]+", " "),  # cm^2: the exponent belongs to the unit
    (r"\b((?:[cdkm]?m|ft|in|yd))[23]\b", r"\1"),
    (r"(?<=[=(])[ ]-[ ](?=[0-9$])", " -"),  # "= - 18" has a sign, "- 18" is a bullet
)
"""What has to go, or to be made plain, before numbers are looked for"""
_ATOM = r"""
    (?: [0-9]+ [ ]{1,2} (?=[0-9]+/[0-9]) )?                           # the whole part of 1 1/2
    (?: [$\u20ac\u00a3\u00a5] [ ]? )? [-+]? [$\u20ac\u00a3\u00a5]?
    (?: [0-9]{1,3} (?: ,[0-9]{3} )+ (?![0-9]) (?: \.[0-9]+ )?         # 1,800.50
      | [0-9]{1,2} (?: ,[0-9]{2} )+ ,[0-9]{3} (?![0-9]) (?: \.[0-9]+ )?   # 1,00,000
      | [0-9]+ (?: \.[0-9]+ )?
      | \.[0-9]+ )
    (?: [eE][-+]?[0-9]{1,3} (?![0-9]) )?
    (?: [ ]?% )?
"""
_CHAIN = re.compile(
    rf"""
    (?P<sign> (?<![\w)\]}}.]) [-+] )?             # a minus after a letter, digit or bracket subtracts
    (?P<body> (?<![0-9.]) (?<!(?<![A-Za-z0-9\\])[A-Za-z]) (?<!(?<![A-Za-z0-9\\])[A-Za-z]_)  # x2 and x_2 are names
      {_ATOM} (?: (?: [ \t]* [-+*/:^] [ \t]* | , ) {_ATOM} )* )
    """,
    re.VERBOSE,
)
_DIGITS = re.compile(r"[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]{1,3})?")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])")
_SCIENTIFIC = re.compile(
    r"(?:(?P<coefficient>[0-9]*\.?[0-9]+)[ \t]*\*[ \t]*)?10[ \t]*\^[ \t]*(?P<power>[-+]?[0-9]{1,3})"
)
_FRACTION = re.compile(r"(?:(?P<whole>[0-9]+)[ ]{1,2})?(?P<top>[0-9]+)[ ]?/[ ]?(?P<bottom>[0-9]+)")


@dataclass(frozen=True)
class Number:
    """A number and whether a percent sign stands behind it; `value` is what is written: 50 for 50 %."""

    value: Fraction
    is_percent: bool = False

    def equals(self, other: "Number") -> bool:
        """Equal values. Where one has a percent sign and the other none, the sign may be a unit (50) or a factor (0.5)."""
        if self.value == other.value:
            return True
        if self.is_percent == other.is_percent:
            return False
        return self._fraction() == other._fraction()

    def _fraction(self) -> Fraction:
        return self.value / 100 if self.is_percent else self.value


def one_spelling(text: str) -> str:
    """The text with one way to write what numbers are made of: ASCII minus and digits, a/b, ^n, no LaTeX spacing."""
    text = re.sub(
        r"[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda found: "^" + found[0].translate(_SUPERSCRIPTS), text
    )
    text = re.sub(r"([0-9]?)([¼-¾⅐-⅞])", _vulgar_fraction, text).translate(_CHARACTERS)
    return _rewrite(text, _SPELLINGS)


def _rewrite(text: str, rewrites: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, replacement in rewrites:
        text = pattern.sub(replacement, text)
    return text


def _for_numbers(text: str) -> str:
    return _rewrite(one_spelling(text), _NOT_NUMBERS)


def _vulgar_fraction(found: re.Match[str]) -> str:
    whole, character = found.groups()
    return f"{whole} {unicodedata.normalize('NFKC', character)}"


def find_last_number(text: str) -> Number | None:
    """The last number in a text; None if there is none, or if the last digits are not one number."""
    last = None
    for found in _CHAIN.finditer(_for_numbers(text)):
        last = found
    return None if last is None else _read(last)


def find_numbers(text: str) -> list[Number | None]:
    """Every number in a text, in order; None where digits are not one number."""
    return [_read(found) for found in _CHAIN.finditer(_for_numbers(text))]


def read_number(text: str) -> Number | None:
    """The value of a text that is one number and nothing else; otherwise None."""
    text = _for_numbers(text).strip().removesuffix(".").rstrip().removesuffix("$").rstrip()
    found = _CHAIN.match(text)
    return _read(found) if found is not None and found.end() == len(text) else None


def number_text(value: Fraction) -> str:
    """A value in plain digits where it has finitely many, else a/b."""
    bottom = value.denominator
    twos = fives = 0
    while bottom % 2 == 0 and twos < MAX_DIGITS:
        bottom, twos = bottom // 2, twos + 1
    while bottom % 5 == 0 and fives < MAX_DIGITS:
        bottom, fives = bottom // 5, fives + 1
    if bottom != 1:
        return f"{value.numerator}/{value.denominator}"
    places = max(twos, fives)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    whole, decimals = digits[: len(digits) - places], digits[len(digits) - places :]
    return f"{sign}{whole}.{decimals}" if places else f"{sign}{whole}"


def is_worked_out(text: str) -> bool:
    """False for sums, differences and products of plain numbers: 12*7, 2+3. True for all else, 1.8*10^3 included."""
    text = _for_numbers(text).strip()
    found = re.fullmatch(r"[-+]?[0-9.]+(?:[ ]*[-+*][ ]*[0-9.]+)+", text)
    return found is None


def _read(found: re.Match[str]) -> Number | None:
    body, negative = found["body"].strip(), found["sign"] == "-"
    if len(body) > MAX_DIGITS:
        return None
    is_percent = body.endswith("%")
    body = re.sub(r"[$\u20ac\u00a3\u00a5]", "", body.removesuffix("%")).strip()
    if body[:1] in ("-", "+"):
        negative, body = negative != (body[0] == "-"), body[1:].strip()
    value = _value(body)
    return None if value is None else Number(-value if negative else value, is_percent)


def _value(body: str) -> Fraction | None:
    if _GROUPED.match(body):
        body = body.replace(",", "")
    if _DIGITS.fullmatch(body):
        return Fraction(body)
    if (found := _SCIENTIFIC.fullmatch(body)) is not None:
        return Fraction(found["coefficient"] or 1) * Fraction(10) ** int(found["power"])
    if (found := _FRACTION.fullmatch(body)) is not None:
        whole, top, bottom = (int(found[name] or 0) for name in ("whole", "top", "bottom"))
        if bottom == 0 or top % bottom == 0:  # 18/2 is not worked out
            return None
        return whole + Fraction(top, bottom)
    return None
