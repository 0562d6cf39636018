"""`vllm-hisparse trace`: recordings of an engine's selections."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from vllm_hisparse.traces import Integers

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Recorded selections; engines with `trace_path` record them.")


@app.callback()
def main() -> None:
    """Recorded selections.

    An engine with `"trace_path": "FILE"` in kv_connector_extra_config, and --enforce-eager, records them.
    """


@app.command()
def info(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A trace (npz).")],
) -> None:
    """What a trace holds."""
    from vllm_hisparse.traces import load_trace

    try:
        trace = load_trace(file)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    selected = trace.num_selected
    lengths = (selected > 0).sum(1)
    host = "not recorded" if trace.host is None else _share(trace.host.sum(), selected.sum())
    mean = f"{selected[selected > 0].mean():.1f}" if selected.any() else "0"
    rows = {
        "streams": str(trace.num_streams),
        "index groups": _distinct(trace.group),
        "requests": _distinct(trace.request),
        "steps": f"{lengths.min()} to {lengths.max()} a stream",
        "selected rows a step": f"{mean} of {trace.top_k}",
        "context": f"{trace.num_positions} rows at most",
        "on the host only": host,
        "scores": "no" if trace.scores is None else "yes",
    }
    table = Table(title=file.name, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _distinct(ids: Integers | None) -> str:
    return "not recorded" if ids is None else str(len(set(ids.tolist())))


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"
