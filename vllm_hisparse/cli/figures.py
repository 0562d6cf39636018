"""What the commands that draw share: their options, matplotlib, and how a figure becomes a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["JsonFile", "PlotFile", "plotting", "save"]

JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the figures to a file.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", dir_okay=False, help="Draw them; .svg, .png or .pdf.")
]


@contextmanager
def plotting() -> Iterator[Any]:
    """matplotlib's pyplot, set up to write text as text, and the same file from the same figures.

    Exits with a message if matplotlib is missing.
    """
    try:
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise typer.BadParameter(
            "got no matplotlib; need it because --plot draws with it: pip install 'vllm-hisparse[plot]'"
        ) from None
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hisparse", "font.size": 9}):
        yield pyplot


def save(pyplot: Any, figure: Any, path: Path) -> None:
    """Write and close the figure. Exits with a message if the format is unknown."""
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    finally:
        pyplot.close(figure)
