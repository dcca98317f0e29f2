"""Charts as SVG text: lines with bands over the step, and stacked bars. No library, so a page needs nothing but itself.

A line's marks carry `data-arm`, by which the page's legend shows and hides it, and a <title>, which a browser shows
under the pointer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#0072B2", "#D55E00", "#009E73", "#B2469A", "#B98500", "#4A90C2", "#333333")
"""Okabe and Ito's, darkened where they are too light for lines on white."""
WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 34
MARKS_AT_MOST = 60
"""Points of a line that get a mark of their own"""


@dataclass(frozen=True)
class Line:
    """One line: (step, value), and a band (step, low, high)."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    faint: Sequence[tuple[float, float]] = ()
    """The same before smoothing, drawn thin"""


def color_of(index: int) -> str:
    """The color of arm or run number `index`."""
    return COLORS[index % len(COLORS)]


def line_chart(
    title: str, lines: Sequence[Line], *, last_step: int, from_zero: bool = False
) -> str:
    """A chart over steps 0 to `last_step`. Its vertical axis covers all lines and bands; `from_zero` begins it at 0."""
    ys = [y for line in lines for _, y in (*line.points, *line.faint)]
    ys += [y for line in lines for _, low, high in line.band for y in (low, high)]
    x_ticks = [tick for tick in nice_ticks(0, last_step) if tick <= last_step]
    y_ticks = nice_ticks(min([*ys, 0] if from_zero else ys), max(ys))
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = x / max(last_step, 1)
        up = (y - y_low) / ((y_high - y_low) or 1)
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    parts = [_grid(x_ticks, y_ticks, place)]
    for line in lines:
        parts.append(_draw(line, place))
    return _svg(title, "".join(parts))


def bar_chart(title: str, bars: Sequence[tuple[str, dict[str, float]]], unit: str) -> str:
    """A horizontal stacked bar for each name; the parts are named in a legend below."""
    names = list(dict.fromkeys(part for _, parts in bars for part in parts))
    longest = max(sum(parts.values()) for _, parts in bars) or 1.0
    row = min(34, (HEIGHT - TOP - 40) / len(bars))
    label_width = min(170, 12 + 7 * max(len(name) for name, _ in bars))
    scale = (WIDTH - label_width - 70) / longest
    out = []
    for index, (name, parts) in enumerate(bars):
        y = TOP + index * row
        out.append(
            f'<text x="{label_width - 6}" y="{y + row / 2 + 4:.0f}" text-anchor="end">{escape(name)}</text>'
        )
        x = float(label_width)
        for part, value in parts.items():
            color = color_of(names.index(part))
            out.append(
                f'<rect x="{x:.1f}" y="{y + 3:.0f}" width="{max(value * scale, 0):.1f}" height="{row - 6:.0f}" '
                f'fill="{color}"><title>{escape(name)}, {escape(part)}: {number(value)} {unit}</title></rect>'
            )
            x += value * scale
        total = sum(parts.values())
        out.append(f'<text x="{x + 5:.0f}" y="{y + row / 2 + 4:.0f}">{number(total)} {unit}</text>')
    x, y = float(label_width), TOP + len(bars) * row + 14
    for index, name in enumerate(names if len(names) > 1 else ()):
        out.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="10" height="10" fill="{color_of(index)}"/>'
            f'<text x="{x + 14:.0f}" y="{y + 9:.0f}">{escape(name)}</text>'
        )
        x += 26 + 7 * len(name)
    return _svg(title, "".join(out))


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from at or below `low` to at or above `high`."""
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / (count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """A number for people: three significant digits, thousands with commas."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


Place = Callable[[float, float], tuple[float, float]]
"""From (step, value) to the point on the drawing"""


def _grid(x_ticks: Sequence[float], y_ticks: Sequence[float], place: Place) -> str:
    digits = max((len(f"{tick:.10f}".rstrip("0").partition(".")[2]) for tick in y_ticks), default=0)
    parts = []
    for tick in y_ticks:
        x, y = place(x_ticks[0], tick)
        text = f"{tick:,.{digits}f}" if digits < 5 else f"{tick:.1e}"
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{text}</text>'
        )
    for tick in x_ticks:
        x, y = place(tick, y_ticks[0])
        if tick == int(tick):
            parts.append(f'<text x="{x}" y="{y + 15}" text-anchor="middle">{int(tick):,}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>'
    )
    return "".join(parts)


def _draw(line: Line, place: Place) -> str:
    name, color = escape(line.name), line.color
    parts = []
    if line.band:
        upper = [place(x, high) for x, _, high in line.band]
        lower = [place(x, low) for x, low, _ in reversed(line.band)]
        parts.append(
            f'<polygon points="{_path(upper + lower)}" fill="{color}" fill-opacity="0.15"/>'
        )
    if len(line.faint) > 1:
        path = _path([place(*point) for point in line.faint])
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1" stroke-opacity="0.35"/>'
        )
    path = _path([place(*point) for point in line.points])
    parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
    every = max(1, len(line.points) // MARKS_AT_MOST)
    for step, value in line.points[::-1][::every]:
        x, y = place(step, value)
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="{3 if len(line.points) <= 20 else 2}" fill="{color}">'
            f"<title>{name}, step {step:g}: {number(value)}</title></circle>"
        )
    return f'<g data-arm="{name}">{"".join(parts)}</g>'


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)


def _svg(title: str, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text class="title" x="{LEFT - 50}" y="16">{escape(title)}</text>{body}</svg>'
    )
