"""One HTML file that needs nothing else: style, script, charts and data are inside, and its policy forbids the network.

What a model wrote reaches the page as JSON in which `<` is escaped, and is shown as text, never as markup.
"""

import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from qerl.reporting.charts import Line, color_of
from qerl.reporting.runs import RunRecord, completion_rows, completion_steps

MAX_ROWS = 4000
MAX_CHARS = 6_000_000
"""Completions in a page, at most"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, body: Iterable[str]) -> str:
    """A whole document."""
    assets = files("qerl.reporting")
    style = assets.joinpath("page.css").read_text(encoding="utf-8")
    script = assets.joinpath("page.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def write_text(path: Path, text: str) -> Path:
    """Write a file whole or not at all."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
    return path


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Sequence[int] = ()
) -> str:
    """A table of plain text cells; the first column and `text_columns` are set to the left."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=text' if index in text_columns else ''}>{escape(value)}</{tag}>"
            for index, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def legend(names: Sequence[str]) -> str:
    """Buttons that show and hide the lines of each name."""
    buttons = (
        f'<button type="button" aria-pressed="true" data-arm="{escape(name)}">'
        f'<span class="dot" style="background:{color_of(index)}"></span>{escape(name)}</button>'
        for index, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(buttons)}</div>'


def has_points(lines: Sequence[Line]) -> bool:
    """Whether there is anything to draw."""
    return any(line.points for line in lines)


def completions_browser(
    records: Sequence[RunRecord], kinds: Sequence[str], title: str = "Completions"
) -> str:
    """The completions of the runs with their filters; whole steps are left out, evenly, where there are too many."""
    chosen, left_out = _choose(records, kinds)
    if not chosen:
        return ""
    prompts: dict[str, int] = {}
    rows = [_compact(name, step, row, prompts) for name, step, row in chosen]
    data = json.dumps({"prompts": list(prompts), "rows": rows}, ensure_ascii=False, allow_nan=False)
    note = f'<p class="soft small">{escape(left_out)}</p>' if left_out else ""
    return f"""<h2 id="browse">{escape(title)}</h2>{note}
<form class="filter">
<label>run<select name="run"><option value="">all</option></select></label>
<label>kind<select name="kind"><option value="">all</option></select></label>
<label>step<select name="step"><option value="">all</option></select></label>
<label>reward from<input type="number" step="any" name="min"></label>
<label>to<input type="number" step="any" name="max"></label>
<label>problem<input name="problem" size="10"></label>
<label>text<input name="text" size="14"></label>
<label>order<select name="order"><option value="time">as sampled</option><option value="low">lowest reward first</option><option value="high">highest first</option></select></label>
<button type="reset">clear</button>
</form>
<p class="pager"><button type="button" id="back">previous</button> <button type="button" id="on">next</button> <span id="count"></span></p>
<div id="cards"></div>
<script type="application/json" id="completions">{data.replace("<", chr(92) + "u003c")}</script>"""


def _choose(
    records: Sequence[RunRecord], kinds: Sequence[str]
) -> tuple[list[tuple[str, int, dict[str, Any]]], str]:
    """(run, step, row) of as many steps as the page can hold, the first and the last among them."""
    steps = [(record, step) for record in records for step in completion_steps(record)]
    every = 1
    while True:
        chosen: list[tuple[str, int, dict[str, Any]]] = []
        size = 0
        kept = 0
        for index, (record, step) in enumerate(steps):
            is_end = step in (0, record.last_step)
            if index % every and not (is_end and every < 64):
                continue
            kept += 1
            for row in completion_rows(record, step):
                if row["kind"] in kinds:
                    chosen.append((record.name, step, row))
                    size += len(row["completion"]) + len(row["prompt"])
            if len(chosen) > MAX_ROWS or size > MAX_CHARS:
                break
        else:
            note = (
                ""
                if kept == len(steps)
                else (
                    f"{kept} of {len(steps)} tables are in this page; all are in the runs' completions/ folders."
                )
            )
            return chosen, note
        if every > len(steps):
            return chosen[
                :MAX_ROWS
            ], "The first completions only; all are in the runs' completions/ folders."
        every *= 2


def _compact(run: str, step: int, row: dict[str, Any], prompts: dict[str, int]) -> dict[str, Any]:
    return {
        "run": run,
        "step": step,
        "kind": row["kind"],
        "problem": row["problem_id"],
        "sample": row["sample_index"],
        "prompt": prompts.setdefault(row["prompt"], len(prompts)),
        "completion": row["completion"],
        "answer": row["answer"],
        "reward": row["reward"],
        "advantage": row.get("advantage"),
        "tokens": row["num_tokens"],
        "finish": row["finish_reason"],
        "terms": {k.partition("/")[2]: v for k, v in row.items() if k.startswith("reward/")},
    }
