"""Drawings as SVG text: boxes, labels and arrows, the same bytes for the same calls."""

from collections.abc import Sequence
from html import escape

INK, SOFT, LINE, PAPER = "#171c26", "#5b6575", "#c4cad3", "#ffffff"
GREEN, GREEN_SOFT = "#0f766e", "#d5efeb"
ORANGE, ORANGE_SOFT = "#b45309", "#fde9cf"
BLUE, BLUE_SOFT = "#1d4ed8", "#dbe6fd"
GREY_SOFT = "#eceff3"

Point = tuple[float, float]


class Drawing:
    """A picture of `width` x `height` on white, so that it can be read on a dark page too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="system-ui, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="12" fill="{PAPER}"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = PAPER,
        stroke: str = LINE,
        radius: float = 8,
        dashed: bool = False,
    ) -> None:
        """A rectangle; (x, y) is its upper left corner."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="1.5"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 14,
        colour: str = INK,
        anchor: str = "start",
        bold: bool = False,
        halo: bool = False,
    ) -> None:
        """One line; (x, y) is the end of its base line that `anchor` names."""
        weight = ' font-weight="650"' if bold else ""
        outline = f' stroke="{PAPER}" stroke-width="5" paint-order="stroke" stroke-linejoin="round"'
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}"'
            f"{weight}{outline if halo else ''}>{escape(text)}</text>"
        )

    def lines(self, x: float, y: float, texts: Sequence[str], size: float = 14, colour: str = INK) -> None:
        """Lines of text below each other."""
        for i, text in enumerate(texts):
            self.text(x, y + i * 1.4 * size, text, size, colour)

    def arrow(self, points: Sequence[Point], colour: str = SOFT, curve: bool = False) -> None:
        """A line with a head; with `curve`, a quadratic curve from the first over the second to the third."""
        head = self._head(points[-2], points[-1], colour)
        name = "Q" if curve else "L"
        (x, y), *rest = points
        if curve:
            (cx, cy), (ex, ey) = rest
            path = f"M{x:g} {y:g}{name}{cx:g} {cy:g} {ex:g} {ey:g}"
        else:
            path = f"M{x:g} {y:g}" + "".join(f"{name}{px:g} {py:g}" for px, py in rest)
        self._parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>{head}')

    def _head(self, before: Point, at: Point, colour: str, size: float = 8) -> str:
        dx, dy = at[0] - before[0], at[1] - before[1]
        length = max((dx * dx + dy * dy) ** 0.5, 1e-9)
        ux, uy = dx / length * size, dy / length * size
        corners = (
            at,
            (at[0] - ux - uy / 2, at[1] - uy + ux / 2),
            (at[0] - ux + uy / 2, at[1] - uy - ux / 2),
        )
        return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}" fill="{colour}"/>'

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"
