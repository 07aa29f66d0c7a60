"""Charts as SVG, made of XML elements, so that whatever they are given comes out as valid, escaped SVG.

Colours are CSS variables of the page around, `--c0` to `--c7`, with what is good on white as their default.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#777777")
WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 26, 26  # margins
TICKS = 5
ROW = 22  # height of a bar
NAMESPACE = "http://www.w3.org/2000/svg"

Point = tuple[float, float, float, float]  # x, mean, least, most


@dataclass(frozen=True)
class Curve:
    """A named line; where its points stand for several values, these are a band around it.

    Attributes:
        label: in the legend.
        points: x ascending, all finite.
        dots: whether each point is marked.
    """

    label: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class _Scale:
    """Maps values of a range to positions on the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(curves: Sequence[Curve], title: str, unit: str = "", x_name: str = "step") -> str:
    """Draw curves over one pair of axes; what each point is shows when the pointer rests on it.

    Args:
        curves: those without points are left out.
        title: read out to those who cannot see it.
        unit: behind the numbers.
        x_name: what x counts.
    """
    curves = [curve for curve in curves if curve.points]
    svg = _svg(HEIGHT, title)
    if not curves:
        _text(svg, WIDTH / 2, HEIGHT / 2, "nothing yet", "middle")
        return _written(svg)
    xs = [point[0] for curve in curves for point in curve.points]
    ys = [value for curve in curves for point in curve.points for value in point[1:]]
    across = _Scale(*_range(xs), LEFT, WIDTH - RIGHT)
    up = _Scale(*_range(ys), HEIGHT - BOTTOM, TOP)
    _grid(svg, across, up, unit, x_name)
    for number, curve in enumerate(curves):
        _draw(svg, curve, _colour(number), across, up, unit, x_name)
    if len(curves) > 1 or curves[0].label:
        _legend(svg, [curve.label for curve in curves], LEFT, 4)
    return _written(svg)


def _draw(svg: Element, curve: Curve, colour: str, across: _Scale, up: _Scale, unit: str, x_name: str) -> None:
    """Draw a band from least to most, the line of means over it, and what to point at."""
    points = [(across(x), up(mean), up(low), up(high)) for x, mean, low, high in curve.points]
    if any(low != high for _, _, low, high in points):
        edge = [(x, high) for x, _, _, high in points] + [(x, low) for x, _, low, _ in reversed(points)]
        SubElement(svg, "polygon", points=_points(edge), fill=colour, opacity="0.2")
    line = _points([(x, mean) for x, mean, _, _ in points])
    SubElement(svg, "polyline", {"points": line, "fill": "none", "stroke": colour, "stroke-width": "1.6"})
    shown = curve.dots or len(points) == 1
    dots = SubElement(svg, "g", {"fill": colour, "fill-opacity": "1" if shown else "0"})
    for (x, y, _, _), (step, mean, least, most) in zip(points, curve.points, strict=True):
        dot = SubElement(dots, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="3" if shown else "5")
        extent = "" if least == most else f" ({least:.5g} to {most:.5g})"
        words = f"{curve.label + ': ' if curve.label else ''}{x_name} {step:.6g}: {mean:.5g}{unit}{extent}"
        SubElement(dot, "title").text = _allowed(words)


def bar_chart(
    rows: Sequence[tuple[str, Mapping[str, float]]], title: str, unit: str, limits: Mapping[str, float] | None = None
) -> str:
    """Draw a bar for each row, of parts one after the other, and where it has to end at most.

    Args:
        rows: the name of each, and its parts.
        title: read out to those who cannot see it.
        unit: behind the numbers.
        limits: a row's limit, by its name.
    """
    limits = limits or {}
    names = list(dict.fromkeys(name for _, parts in rows for name, size in parts.items() if size))
    columns = 4
    below = 24 + 16 * math.ceil(len(names) / columns)
    height = 10 + ROW * len(rows) + 16 + below
    svg = _svg(height, title)
    most = max([sum(parts.values()) for _, parts in rows] + list(limits.values()) + [0.0])
    scale = _Scale(0.0, most or 1.0, LEFT + 40, WIDTH - 90)
    for number, (label, parts) in enumerate(rows):
        top = 10.0 + ROW * number
        _text(svg, scale.start - 6, top + 13, label, "end")
        edge = 0.0
        for name, size in parts.items():
            if not size:
                continue
            x, width = scale(edge), scale(edge + size) - scale(edge)
            colour = _colour(names.index(name))
            bar = SubElement(svg, "rect", x=f"{x:.1f}", y=f"{top:.1f}", width=f"{width:.1f}", height=f"{ROW - 5}")
            bar.set("fill", colour)
            SubElement(bar, "title").text = _allowed(f"{label}: {name}: {size:.4g}{unit}")
            edge += size
        if label in limits:
            end = f"{scale(limits[label]):.1f}"
            mark = SubElement(svg, "line", x1=end, x2=end, y1=f"{top - 2:.1f}", y2=f"{top + ROW - 3:.1f}")
            mark.set("class", "limit")
            SubElement(mark, "title").text = _allowed(f"{label}: has {limits[label]:.4g}{unit}")
        of = f" of {limits[label]:.4g}" if label in limits else ""
        _text(svg, scale(max(edge, limits.get(label, 0.0))) + 6, top + 13, f"{edge:.3g}{of}{unit}")
    _legend(svg, names, LEFT, 10 + ROW * len(rows) + 16, columns)
    return _written(svg)


def grid_chart(rows: Sequence[tuple[str, Sequence[float]]], title: str, what: str) -> str:
    """Draw a row of cells each, as strong as the part from 0 to 1 that it says of the column.

    Args:
        rows: the name of each and its parts, all equally many.
        title: read out to those who cannot see it.
        what: of which a cell is a part, such as "layer".
    """
    columns = max((len(cells) for _, cells in rows), default=0)
    height = 10 + ROW * len(rows) + 20
    svg = _svg(height, title)
    width = (WIDTH - RIGHT - LEFT - 40) / max(columns, 1)
    for number, (label, cells) in enumerate(rows):
        top = 10.0 + ROW * number
        _text(svg, LEFT + 34, top + 13, label, "end")
        for column, part in enumerate(cells):
            x, gap = LEFT + 40 + width * column, 1 if width > 4 else 0
            cell = SubElement(
                svg, "rect", x=f"{x:.2f}", y=f"{top:.1f}", width=f"{width - gap:.2f}", height=f"{ROW - 5}"
            )
            cell.set("fill", _colour(0))
            cell.set("fill-opacity", f"{0.06 + 0.94 * part:.3f}")
            SubElement(cell, "title").text = _allowed(f"{label}: {part:.3g} of {what} {column}")
    for at in _ticks(0, max(columns - 1, 1)):
        if at == int(at) and at < columns:
            _text(svg, LEFT + 40 + width * (at + 0.5), height - 6, f"{at:.0f}", "middle")
    return _written(svg)


def _svg(height: float, title: str) -> Element:
    svg = Element("svg", xmlns=NAMESPACE, viewBox=f"0 0 {WIDTH} {height:g}", role="img")
    svg.set("font-size", "11")
    svg.set("font-family", "system-ui, sans-serif")
    SubElement(svg, "title").text = _allowed(title)
    return svg


def _grid(svg: Element, across: _Scale, up: _Scale, unit: str, x_name: str) -> None:
    for value in _ticks(up.low, up.high):
        y = f"{up(value):.1f}"
        line = SubElement(
            svg, "line", {"x1": f"{LEFT}", "x2": f"{WIDTH - RIGHT}", "y1": y, "y2": y, "stroke": "currentColor"}
        )
        line.set("opacity", "0.15")
        _text(svg, LEFT - 6, up(value) + 4, f"{value:.6g}{unit}", "end")
    for value in _ticks(across.low, across.high):
        _text(svg, across(value), HEIGHT - BOTTOM + 16, f"{value:.6g}", "middle")
    _text(svg, LEFT - 6, HEIGHT - BOTTOM + 16, x_name, "end")


def _legend(svg: Element, labels: Sequence[str], left: float, top: float, columns: int = 4) -> None:
    width = (WIDTH - left) / columns
    for number, label in enumerate(labels):
        x, y = left + width * (number % columns), top + 16 * (number // columns)
        SubElement(svg, "rect", x=f"{x:.1f}", y=f"{y:.1f}", width="10", height="10", fill=_colour(number))
        _text(svg, x + 14, y + 9, label)


def _text(svg: Element, x: float, y: float, text: str, anchor: str = "start") -> None:
    element = SubElement(svg, "text", x=f"{x:.1f}", y=f"{y:.1f}", fill="currentColor")
    element.set("text-anchor", anchor)
    element.text = _allowed(text)


def _colour(number: int) -> str:
    number %= len(COLOURS)
    return f"var(--c{number}, {COLOURS[number]})"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and most, apart even where they are the same."""
    low, high = min(values), max(values)
    if low == high:
        apart = abs(low) * 0.05 or 0.5
        return low - apart, high + apart
    return low, high


def _ticks(low: float, high: float) -> list[float]:
    """Return about TICKS round numbers from low to high."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _allowed(text: str) -> str:
    """Replace the characters that XML has no way to write."""
    return "".join(
        character if character in "\t\n" or " " <= character <= "\ud7ff" or "\ue000" <= character <= "\ufffd"
        or character > "\uffff" else "\ufffd"
        for character in text
    )  # fmt: skip


def _written(svg: Element) -> str:
    return tostring(svg, encoding="unicode")
