"""The picture of `vllm-hisparse simulate residency`. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .figures import plotting, save

__all__ = ["draw"]

COLOURS = {
    "vllm": "#888888",
    "in-tree": "#c8553d",
    "in-tree-packed": "#e0a458",
    "hisparse-fcfs": "#6fb39a",
    "hisparse": "#0b6e4f",
}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Decoding requests over time, one panel a number of sessions. Exits with a message if that fails."""
    numbers = sorted({row["sessions"] for row in rows})
    with plotting() as pyplot:
        figure, axes = pyplot.subplots(
            1, len(numbers), figsize=(4.4 * len(numbers), 3.6), squeeze=False, layout="constrained"
        )
        for axis, number in zip(axes[0], numbers, strict=True):
            for row in (row for row in rows if row["sessions"] == number):
                seconds, decoding, _ = zip(*row["course"], strict=True)
                label = f"{row['policy']}: mean {row['mean_decoding']:g}, {row['turns_per_s']:g} turns/s"
                axis.step(seconds, decoding, color=COLOURS[row["policy"]], label=label, linewidth=1.4)
            axis.set(title=f"{number} sessions", xlabel="simulated seconds", ylim=(0, None))
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7, loc="upper left")
        axes[0][0].set_ylabel("requests that decode")
        save(pyplot, figure, path)
