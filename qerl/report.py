"""Draw a page about runs: all metrics as charts, and a browser of their completions.

    python -m qerl.report runs/NAME                 writes runs/NAME/report.html
    python -m qerl.report runs/A runs/B --out ab.html

The page is one file that needs no network. For arms over seeds, with intervals, there is qerl.compare.
"""

import sys
from pathlib import Path

from qerl.errors import UserError
from qerl.settings.cli import run_main

USAGE = """\
usage: python -m qerl.report RUN... [--out FILE.html]

Draw a self-contained page about one or several training runs: every metric as a chart, and a completions browser.
With one run the page is RUN/report.html; a folder of qerl.compare has its own report, which is drawn anew.
"""


def main(argv: list[str] | None = None) -> int:
    """Parse, read, draw. Returns the process' exit code."""
    folders, out = _parse(sys.argv[1:] if argv is None else argv)
    from qerl.metrics import say

    if len(folders) == 1 and (folders[0] / "compare.json").exists():
        from qerl.compare import make_report

        say(f"report: {make_report(folders[0]).folder / 'report.html'}")
        return 0
    say(f"report: {write_report(folders, out)}")
    return 0


def write_report(folders: list[Path], out: Path | None = None) -> Path:
    """Write the page of some runs; returns its path. Raises UserError for folders that are no runs."""
    from qerl.reporting.page import write_text
    from qerl.reporting.run_page import html
    from qerl.reporting.runs import read_record

    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    records = [
        read_record(folder, name if unique else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]
    path = out or folders[0] / "report.html"
    try:
        return write_text(path, html(records))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _parse(words: list[str]) -> tuple[list[Path], Path | None]:
    if "--help" in words or "-h" in words:
        sys.stdout.write(USAGE)
        raise SystemExit(0)
    folders: list[Path] = []
    out = None
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name == "--out":
            if not equals and not rest:
                raise UserError("--out needs a file name")
            out = Path(value if equals else rest.pop(0))
        elif word.startswith("-"):
            raise UserError(f"unknown flag {word}; python -m qerl.report RUN... [--out FILE.html]")
        else:
            folders.append(Path(word))
    if not folders:
        raise UserError("which runs? python -m qerl.report RUN... [--out FILE.html]")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a run is given twice")
    if len(folders) > 1 and out is None:
        raise UserError("several runs: say where the page goes, --out FILE.html")
    return folders, out


if __name__ == "__main__":
    sys.exit(run_main(main))
