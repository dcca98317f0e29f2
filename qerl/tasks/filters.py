"""Which rows of a data set are used: `task.filter` and `task.levels`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qerl.errors import UserError
from qerl.tasks.problems import Row, column_names, read_column

BOUNDS = frozenset({"min", "max"})


def keep_rows(rows: Sequence[Row], conditions: Mapping[str, Any], where: str) -> list[int]:
    """Numbers of the rows that meet every condition.

    A condition is a value, a list of values, or {"min": ..., "max": ...}, both inclusive; a missing value meets none.
    Raises UserError for a column that is not there, bounds on what is no number, and when no row is left.
    """
    there = column_names(rows)
    for column, wanted in conditions.items():
        if column not in there:
            raise UserError(f"task.filter: no column {column!r}; {where} has {', '.join(there)}")
        if isinstance(wanted, dict) and not (
            wanted and wanted.keys() <= BOUNDS and all(map(_is_number, wanted.values()))
        ):
            raise UserError(
                f"task.filter: {column} takes a value, a list of values, or a table with the numbers min and max, "
                f"not {wanted}"
            )
    kept = [
        number
        for number, row in enumerate(rows)
        if all(_meets(read_column(row, c), wanted, c, where) for c, wanted in conditions.items())
    ]
    if not kept:
        raise UserError(f"task.filter leaves no row of {where}{_values(rows, conditions)}")
    return kept


def keep_levels(
    rows: Sequence[Row], numbers: Sequence[int], levels: Sequence[int], where: str
) -> list[int]:
    """Those of the rows whose column `level` is one of `levels`: a number, or a text with one such as "Level 3"."""
    if not levels:
        return list(numbers)
    if "level" not in column_names(rows):
        raise UserError(
            f"task.levels: {where} has no column 'level'; it has {', '.join(column_names(rows))} (task.filter takes any)"
        )
    kept = [number for number in numbers if _level(rows[number].get("level")) in levels]
    if not kept:
        raise UserError(
            f"task.levels {tuple(levels)} leaves no row of {where}{_values(rows, {'level': None})}"
        )
    return kept


def _level(value: Any) -> int | None:
    match = re.search(r"[0-9]+", str(value))
    return int(match[0]) if match else None


def _meets(value: Any, wanted: Any, column: str, where: str) -> bool:
    if value is None:
        return False
    if isinstance(wanted, dict):
        if not _is_number(value):
            raise UserError(
                f"task.filter: {column} has {value!r:.40} in {where}, which is no number: min and max mean nothing"
            )
        return wanted.get("min", value) <= value <= wanted.get("max", value)
    options = wanted if isinstance(wanted, list | tuple) else [wanted]
    return any(value == option or str(value) == str(option) for option in options)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values(rows: Sequence[Row], columns: Mapping[str, Any]) -> str:
    """What the columns hold, for a message."""
    parts = []
    for column in columns:
        seen = list(dict.fromkeys(str(read_column(row, column))[:30] for row in rows[:1000]))
        parts.append(
            f"{column} has {', '.join(sorted(seen)[:8])}{', ...' if len(seen) > 8 else ''}"
        )
    return f"; {'; '.join(parts)}" if parts else ""
