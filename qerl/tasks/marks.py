r"""What a completion marks as its answer: the last of \boxed{...}, `#### ...` and <answer>...</answer>."""

import re

_BRACES = re.compile(r"(\\(?:boxed|fbox)\s{0,9}\{)|\\.|[{}]", re.DOTALL)
"""What opens a box, escaped characters (text), and braces"""
_HASHES = re.compile(r"####([^\n]*)")


def last_boxed(text: str) -> str | None:
    """The content of the last whole \\boxed{...} or \\fbox{...}, braces balanced; None if there is none."""
    found = _last_box(text)
    return None if found is None else found[1]


def _last_box(text: str) -> tuple[int, str] | None:
    """Where the last whole box begins, and its content. A box in a whole box is part of that one's content."""
    whole: list[tuple[int, int, int]] = []  # (start, start of the content, end of the content)
    opened: list[tuple[int, int] | None] = []  # None: a brace that opens no box
    for found in _BRACES.finditer(text):
        if found[0] == "{":
            opened.append(None)
        elif found[0] == "}":
            box = opened.pop() if opened else None
            if box is not None:
                while whole and whole[-1][0] > box[0]:
                    whole.pop()
                whole.append((*box, found.start()))
        elif found[1]:
            opened.append((found.start(), found.end()))
    if not whole:
        return None
    start, content, end = whole[-1]
    return start, text[content:end]


def last_tagged(text: str) -> str | None:
    """What the last <answer>...</answer> encloses, without space around it; None if there is none."""
    found = _last_tag(text)
    return None if found is None else found[1]


def _last_tag(text: str) -> tuple[int, str] | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else (start, text[start + len("<answer>") : end].strip())


def marked_answer(text: str) -> str | None:
    r"""What a text marks as its answer: the last of \boxed{...}, `#### ...`, <answer>...</answer>; None if nothing is."""
    marks = [(match.start(), match[1]) for match in _HASHES.finditer(text)]
    if (tag := _last_tag(text)) is not None:
        marks.append(tag)
    if (box := _last_box(text)) is not None:
        marks.append(box)
    if not marks:
        return None
    content = max(marks)[1].strip()
    inner = marked_answer(content) if "\\boxed" in content or "\\fbox" in content else None
    return content if inner is None else inner
