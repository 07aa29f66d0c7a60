"""A curve in a terminal, drawn with the dots of Braille: two columns and four rows of them a character."""

import math
from collections.abc import Sequence

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of the left and the right column, from above
_BLANK = 0x2800


def braille_curve(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """Draw points, whose x ascends, as a line over `width` x `height` characters; a label of the scale before each row.

    Args:
        points: (x, y), finite.
        width: characters of the whole, with the labels.
        height: lines.
    """
    if not points:
        return []
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    labels = [f"{high:.4g}"] + [""] * (height - 2) + [f"{low:.4g}"] if height > 1 else [f"{high:.4g}"]
    margin = max(map(len, labels)) + 1
    columns, rows = max(2 * (width - margin), 2), 4 * height
    cells = [[0] * (columns // 2) for _ in range(height)]

    def column(x: float) -> int:
        return round((x - left) / ((right - left) or 1.0) * (columns - 1))

    def row(y: float) -> int:
        return round((high - y) / ((high - low) or 1.0) * (rows - 1))

    before: tuple[int, int] | None = None
    for x, y in points:
        here = column(x), row(y)
        for across, down in _line(before or here, here):
            cells[down // 4][across // 2] |= _DOTS[across % 2][down % 4]
        before = here
    return [
        f"{label:>{margin - 1}} " + "".join(chr(_BLANK + cell) for cell in line)
        for label, line in zip(labels, cells, strict=True)
    ]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots from one to the other."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            math.floor(start[0] + (end[0] - start[0]) * at / steps + 0.5),
            math.floor(start[1] + (end[1] - start[1]) * at / steps + 0.5),
        )
        for at in range(steps + 1)
    ]
