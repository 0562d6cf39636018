"""The picture of `vllm-hisparse simulate policy`. Needs matplotlib, which nothing else does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .figures import plotting, save

__all__ = ["Curve", "Panel", "draw"]

PANEL_INCHES = (4.5, 4.2)
LEGEND_COLUMNS = 5
# What the engine does stands out; bounds are dashed.
EMPHASISED = ("lru", "lrfu-kernel")
BOUNDS = ("keep-current", "belady")


@dataclass(frozen=True)
class Curve:
    """One policy."""

    name: str
    miss_percent: tuple[float, ...]  # one a size of region


@dataclass(frozen=True)
class Panel:
    """One trace."""

    title: str
    multiples: tuple[float, ...]  # sizes of region in multiples of top-k
    curves: tuple[Curve, ...]


def draw(panels: list[Panel], path: Path, log: bool) -> None:
    """Draw the panels side by side. Exits with a message if matplotlib is missing or the format unknown."""
    with plotting() as pyplot:
        size = (PANEL_INCHES[0] * len(panels), PANEL_INCHES[1])
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained"
        )
        for axis, panel in zip(axes[0], panels, strict=True):
            _draw_panel(axis, panel, log)
        axes[0][0].set_ylabel("misses a selected row, %")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=LEGEND_COLUMNS)
        save(pyplot, figure, path)


def _draw_panel(axis: object, panel: Panel, log: bool) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    for curve in panel.curves:
        axis.plot(
            panel.multiples,
            curve.miss_percent,
            label=curve.name,
            marker="o",
            markersize=3,
            linewidth=2.4 if curve.name in EMPHASISED else 1.1,
            linestyle="--" if curve.name in BOUNDS else "-",
        )
    axis.set_title(panel.title)
    axis.set_xlabel("rows of the hot region / top-k")
    axis.set_xscale("log")
    axis.set_xticks(panel.multiples, [f"{multiple:.4g}" for multiple in panel.multiples])
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3)
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    else:
        axis.set_ylim(bottom=0)
