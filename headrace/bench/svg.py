"""Line charts as inline SVG: axes with round ticks, a legend, a title on every point; colours come from CSS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46
COLOURS = 8
_MARKED = 24  # lines of more points have no dots

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart; ``points`` in order of x."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Axis:
    """``log2``: equal distances for equal factors. ``top``: a fixed end instead of the highest value."""

    label: str
    log2: bool = False
    top: float | None = None


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    log2: bool
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        low, high = (math.log2(self.low), math.log2(self.high)) if self.log2 else (self.low, self.high)
        at = math.log2(value) if self.log2 else value
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def round_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cover [low, high]."""
    span = high - low or abs(high) or 1.0
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    if axis.log2:
        ticks = tuple(sorted(set(values)))
        return _Scale(ticks[0], ticks[-1], start, end, True, ticks)
    ticks = tuple(round_ticks(min(0.0, *values), axis.top if axis.top is not None else max(values)))
    return _Scale(ticks[0], ticks[-1], start, end, False, ticks)


def line_chart(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """An ``<svg>``; "" when no line has a point."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return ""
    across = _scale(x, [point[0] for line in drawn for point in line.points], LEFT, WIDTH - RIGHT)
    up = _scale(y, [point[1] for line in drawn for point in line.points], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>',
        *_axes(x, y, across, up),
    ]
    for index, line in enumerate(drawn):
        parts += _line(line, f"c{index % COLOURS}", x, y, across, up)
    return "\n".join([*parts, "</svg>", _legend(drawn)])


def _axes(x: Axis, y: Axis, across: _Scale, up: _Scale) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in up.ticks:
        at = up(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in across.ticks:
        parts.append(
            f'<text class="tick" x="{across(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
        )
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x.label)}</text>'
    )
    turned = f'transform="translate(14 {(TOP + bottom) / 2}) rotate(-90)"'
    parts.append(f'<text class="label" {turned} text-anchor="middle">{escape(y.label)}</text>')
    return parts


def _line(line: Line, colour: str, x: Axis, y: Axis, across: _Scale, up: _Scale) -> list[str]:
    places = [(across(px), up(py)) for px, py in line.points]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    parts = [f'<polyline class="line {colour}" points="{path}"><title>{escape(line.name)}</title></polyline>']
    if len(places) <= _MARKED:
        for (px, py), (vx, vy) in zip(places, line.points, strict=True):
            note = escape(f"{line.name}: {x.label} {vx:g}, {y.label} {vy:.4g}")
            parts.append(
                f'<circle class="dot {colour}" cx="{px:.1f}" cy="{py:.1f}" r="4"><title>{note}</title></circle>'
            )
    return parts


def _legend(lines: Sequence[Line]) -> str:
    """Nothing for a single line: the title names it."""
    if len(lines) < 2:
        return ""
    keys = [
        f'<span><i class="key c{index % COLOURS}"></i>{escape(line.name)}</span>'
        for index, line in enumerate(lines)
    ]
    return f'<p class="legend">{"".join(keys)}</p>'
