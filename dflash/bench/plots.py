"""Plots as SVG text: bars and lines, no script, no font, no colour of their own (the page's style has those).

Each is an image with a title and a description that says in words what it shows; series differ by dash and marker as
well as by colour. Coordinates are in user units, the page scales them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from xml.sax.saxutils import escape

_WIDTH = 480
_BAR, _GAP = 18, 14
_LEGEND = 18
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 56, 12, 44
_numbers = count(1)  # so that ids in one page differ


@dataclass(frozen=True)
class Bar:
    """A mean, and the values that it is a mean of."""

    label: str
    value: float
    values: Sequence[float] = ()


@dataclass(frozen=True)
class Series:
    """Points by rising x."""

    name: str
    points: Sequence[tuple[float, float]]


def ticks(most: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`, about `wanted` of them."""
    if most < 1e-9:
        return [0.0, 1.0]
    rough = most / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)
    return [round(index * step, 10) for index in range(math.ceil(most / step - 1e-9) + 1)]


def bars(title: str, about: str, rows: Sequence[Bar], unit: str = "", mark: float | None = None) -> str:
    """Horizontal bars from 0 with their values at the right, a dot for each of `values`, and a line at `mark`."""
    scale = ticks(max([*(row.value for row in rows), *(v for row in rows for v in row.values), mark or 0.0]))
    height = _TOP + len(rows) * (_BAR + _GAP) + _BOTTOM

    def x(value: float) -> float:
        return _LEFT + value / scale[-1] * (_WIDTH - _LEFT - _RIGHT)

    floor = height - _BOTTOM
    parts = [_grid(x(at), _TOP, x(at), floor, _number(at), (x(at), floor + 16), "middle") for at in scale]
    for index, row in enumerate(rows):
        top = _TOP + _GAP / 2 + index * (_BAR + _GAP)
        middle = top + _BAR / 2
        parts.append(_text(_LEFT - 8, middle + 4, row.label, "end"))
        parts.append(
            f'<rect class="bar" x="{_LEFT}" y="{top:g}" width="{x(row.value) - _LEFT:.1f}" height="{_BAR}"/>'
        )
        parts += [f'<circle class="dot" cx="{x(v):.1f}" cy="{middle:g}" r="2.5"/>' for v in row.values]
        parts.append(_text(_WIDTH - 4, middle + 4, _number(row.value), "end", "value"))
    if mark is not None:
        parts.append(f'<line class="mark" x1="{x(mark):.1f}" y1="{_TOP}" x2="{x(mark):.1f}" y2="{floor}"/>')
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, height - 6, unit, "middle", "axis"))
    return _svg(title, about, height, parts)


def lines(
    title: str,
    about: str,
    series: Sequence[Series],
    *,
    across: str,
    up: str,
    height: int = 260,
    most: float | None = None,
    even: bool = False,
) -> str:
    """Lines over numbers, y from 0 (to `most`), x from the least to the greatest; a legend for more than one.

    `even` spaces the x values evenly, whatever lies between them.
    """
    xs = sorted({at for one in series for at, _ in one.points})
    scale = ticks(most if most is not None else max(value for one in series for _, value in one.points))
    left, right, top = 56, 20, 14 + (_LEGEND * math.ceil(len(series) / 2) if len(series) > 1 else 0)
    floor, span = height - _BOTTOM, (xs[-1] - xs[0]) or 1.0

    def place(at: float, value: float) -> tuple[float, float]:
        share = xs.index(at) / max(1, len(xs) - 1) if even else (at - xs[0]) / span
        share = share if len(xs) > 1 else 0.5
        return left + share * (_WIDTH - left - right), floor - value / scale[-1] * (floor - top)

    parts = []
    for at in scale:
        y = place(xs[0], at)[1]
        parts.append(_grid(left, y, _WIDTH - right, y, _number(at), (left - 8, y + 4), "end"))
    for at in xs if even else _spaced(xs):
        parts.append(_text(place(at, 0)[0], floor + 16, _number(at), "middle"))
    for index, one in enumerate(series):
        spots = [place(*point) for point in one.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline class="line s{index % 4}" points="{path}"/>')
        parts += [_marker(index, x, y) for x, y in spots]
    parts += _legend(series) if len(series) > 1 else []
    parts.append(_text((left + _WIDTH - right) / 2, height - 6, across, "middle", "axis"))
    parts.append(
        f'<text class="axis" text-anchor="middle" transform="translate(14 {(top + floor) / 2:g}) rotate(-90)">'
        f"{escape(up)}</text>"
    )
    return _svg(title, about, height, parts)


def _svg(title: str, about: str, height: float, parts: Sequence[str]) -> str:
    name = f"plot{next(_numbers)}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-labelledby="{name}t {name}d">'
        f'<title id="{name}t">{escape(title)}</title><desc id="{name}d">{escape(about)}</desc>'
        + "".join(parts)
        + "</svg>"
    )


def _legend(series: Sequence[Series]) -> list[str]:
    """Two to a row."""
    parts = []
    for index, one in enumerate(series):
        x, y = 56 + index % 2 * 200, 10 + index // 2 * _LEGEND
        parts.append(f'<line class="line s{index % 4}" x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}"/>')
        parts.append(_marker(index, x + 13, y))
        parts.append(_text(x + 32, y + 4, one.name, "start"))
    return parts


def _marker(index: int, x: float, y: float) -> str:
    kind = index % 4
    if kind == 0:
        return f'<circle class="m s0" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    if kind == 1:
        return f'<rect class="m s1" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
    side = 4 if kind == 2 else -4
    corners = ((x, y - side), (x - 4, y + side), (x + 4, y + side))
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return f'<polygon class="m s{kind}" points="{points}"/>'


def _grid(
    x1: float, y1: float, x2: float, y2: float, label: str, at: tuple[float, float], anchor: str
) -> str:
    line = f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
    return line + _text(*at, label, anchor)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _spaced(xs: Sequence[float], least: float = 0.08) -> list[float]:
    """Of the places `xs`, those whose labels do not run into each other: first come, and the last."""
    span = (xs[-1] - xs[0]) or 1.0
    kept: list[float] = []
    for at in xs:
        if not kept or (at - kept[-1]) / span >= least:
            kept.append(at)
    return kept


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
