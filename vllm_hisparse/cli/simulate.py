"""`vllm-hisparse simulate`: what a replacement policy and a size of region would have missed."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .figures import JsonFile, PlotFile

if TYPE_CHECKING:
    from vllm_hisparse.traces import Trace

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Replay recorded selections.")

DEFAULT_ROWS = "2k,3k,4k"
# Of what the figures are: also the `rule` of the JSON.
RULE = (
    "misses a selected row in percent, mean over streams; a step's selection is pinned, every miss is loaded,"
    " the row that the step writes is free, regions start empty and the first step is not counted"
)


@dataclass(frozen=True)
class Result:
    """Figures of one trace."""

    name: str
    trace: Trace
    rows: tuple[int, ...]  # sizes of region
    miss_percent: dict[str, tuple[float, ...]]  # by policy, one a size


@app.callback()
def main() -> None:
    """Replay recorded selections."""


@app.command("policy")
def policy_command(
    traces: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="Traces (npz).", metavar="TRACE...")
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy; may be given several times. All by default.")
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Rows of the hot region, separated by commas; 2k means twice top-k.")
    ] = DEFAULT_ROWS,
    host_only: Annotated[
        bool, typer.Option("--host-only", help="Replay only what the recording engine had on the host alone.")
    ] = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    log: Annotated[bool, typer.Option("--log", help="A logarithmic axis of the plot.")] = False,
) -> None:
    """Miss rates of replacement policies on selection traces, by size of the hot region."""
    try:
        results = [_simulate(path, policy, rows, host_only) for path in traces]
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = Console()
    for result in results:
        trace = result.trace
        shape = f"{trace.num_streams} streams, {trace.num_steps} steps, top-k {trace.top_k}"
        console.print(f"{result.name}: {shape}", highlight=False, soft_wrap=True)
        console.print("misses a selected row in %, by rows of the region", highlight=False)
        console.print(_table(result))
    if json_file is not None:
        json_file.write_text(json.dumps(_report(results), indent=1) + "\n")
    if plot_file is not None:
        _plot(results, plot_file, log)


def parse_rows(text: str, top_k: int) -> tuple[int, ...]:
    """`2k,300` as row counts: multiples of top-k, or absolute. Raises ValueError."""
    sizes = []
    for word in text.split(","):
        try:
            size = int(float(word[:-1]) * top_k) if word.endswith("k") else int(word)
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"got rows {word!r}; need a number such as 4096, or a multiple of top-k such as 2k, because "
                "they are slots of a hot region"
            ) from error
        sizes.append(size)
    return tuple(sizes)


def _simulate(path: Path, names: list[str] | None, rows: str, host_only: bool) -> Result:
    from vllm_hisparse.policies.registry import POLICIES
    from vllm_hisparse.policies.replay import replay
    from vllm_hisparse.traces import load_trace

    unknown = sorted(set(names or ()) - set(POLICIES))
    if unknown:
        raise ValueError(
            f"got policies {unknown}; need names among {list(POLICIES)} because no other is built in"
        )
    trace = load_trace(path)
    if host_only:
        trace = trace.only_host()
    sizes = parse_rows(rows, trace.top_k)
    chosen = names or [name for name, p in POLICIES.items() if trace.scores is not None or not p.needs_scores]
    figures = {
        name: tuple(replay(trace, POLICIES[name], size).miss_percent for size in sizes) for name in chosen
    }
    return Result(path.stem, trace, sizes, figures)


def _table(result: Result) -> Table:
    table = Table()
    table.add_column("policy", no_wrap=True)
    for size in result.rows:
        table.add_column(f"{size / result.trace.top_k:.4g}k\n{size}", justify="right", no_wrap=True)
    for name, figures in result.miss_percent.items():
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    return table


def _report(results: list[Result]) -> dict[str, Any]:
    command = ["vllm-hisparse", *(Path(word).name if "/" in word else word for word in sys.argv[1:])]
    return {
        "command": shlex.join(command),
        "rule": RULE,
        "traces": {
            result.name: {
                "streams": result.trace.num_streams,
                "steps": result.trace.num_steps,
                "top_k": result.trace.top_k,
                "rows": list(result.rows),
                "miss_percent": {
                    name: [round(figure, 2) for figure in figures]
                    for name, figures in result.miss_percent.items()
                },
            }
            for result in results
        },
    }


def _plot(results: list[Result], path: Path, log: bool) -> None:
    from vllm_hisparse.cli.policy_plot import Curve, Panel, draw

    panels = [
        Panel(
            f"{result.name} (top-k {result.trace.top_k})",
            tuple(size / result.trace.top_k for size in result.rows),
            tuple(Curve(name, figures) for name, figures in result.miss_percent.items()),
        )
        for result in results
    ]
    draw(panels, path, log)
