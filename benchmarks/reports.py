"""What the benchmarks write: rows on the terminal as they come, a JSON file at the end, in $OUT or in benchmarks/results."""

import json
import os
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
"""What is committed"""


def print_row(row: dict[str, Any]) -> None:
    """One line, at once."""
    print("ROW", json.dumps(row), flush=True)


def results_folder() -> Path:
    """Where results go; made if it is not there."""
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_report(name: str, report: dict[str, Any]) -> None:
    """Write NAME.json."""
    (results_folder() / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
