"""`vllm-hisparse simulate residency`: how many requests decode at a time under three residency policies."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .figures import JsonFile, PlotFile

if TYPE_CHECKING:
    from vllm_hisparse.simulation.residency import Outcome, Simulation

__all__ = ["residency_command"]

GB = 1e9
COURSE_POINTS = 120  # of each run, in the JSON and the plot
COLUMNS = (
    ("sessions", "sessions"),
    ("policy", "policy"),
    ("mean_decoding", "decoding,\nmean"),
    ("turns_per_s", "turns\na second"),
    ("preemptions", "preemp-\ntions"),
    ("recomputed_tokens", "tokens\nrecomputed"),
    ("to_host_gb", "to host,\nGB"),
    ("missed_gb", "misses,\nGB"),
    ("restored_gb", "restored,\nGB"),
    ("mean_run_blocks", "host run,\nblocks"),
)


def residency_command(
    sessions: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Concurrent sessions; may be repeated. 64 by default."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="vllm, in-tree, in-tree-packed or hisparse; may be repeated. All by default."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Simulated time.")] = 1800.0,
    warmup: Annotated[float, typer.Option(min=0, help="Simulated seconds that do not count.")] = 600.0,
    device_gib: Annotated[float, typer.Option(min=1, help="KV memory of a GPU.")] = 24.0,
    host_gib: Annotated[float, typer.Option(min=1, help="Host pool.")] = 1024.0,
    pause: Annotated[float, typer.Option(min=0, help="Seconds between the turns of a session.")] = 0.0,
    prefill_rate: Annotated[
        float, typer.Option(min=1, help="Tokens a second that prefill computes.")
    ] = 12_000.0,
    link_gbps: Annotated[float, typer.Option(min=1, help="Reads from the host, GB/s.")] = 48.0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Decoding requests of GLM-5.2 on eight H200, agentic load. A simulation, see docs/simulation.md."""
    from vllm_hisparse.simulation.engine import EngineSize
    from vllm_hisparse.simulation.hardware import Hardware
    from vllm_hisparse.simulation.load import AgenticLoad
    from vllm_hisparse.simulation.residency import POLICIES, Simulation
    from vllm_hisparse.testing.logs import only_errors

    unknown = sorted(set(policy or ()) - set(POLICIES))
    if unknown:
        raise typer.BadParameter(
            f"got policies {unknown}; need names among {list(POLICIES)} because no other is modelled"
        )
    if warmup >= seconds:
        raise typer.BadParameter(
            f"got warmup {warmup:g}; need less than {seconds:g} because nothing would be counted"
        )
    size = EngineSize(device_gib=device_gib, host_gib=host_gib)
    hardware = Hardware(prefill_tokens_per_s=prefill_rate, to_device_gbps=link_gbps)
    outcomes: list[tuple[int, Outcome]] = []
    with only_errors(), Progress(console=Console(stderr=True), transient=True) as progress:
        for number in sessions or [64]:
            for name in policy or POLICIES:
                load = AgenticLoad(num_sessions=number, pause_s=pause)
                simulation = Simulation(name, size, load, hardware, warmup)
                _watch(simulation, seconds, progress, f"{name}, {number} sessions")
                outcomes.append((number, simulation.outcome))
    rows = [_row(number, outcome) for number, outcome in outcomes]
    Console().print(_table(rows))
    if json_file is not None:
        assumptions = {"engine": asdict(size), "hardware": asdict(hardware), "load": asdict(load)}
        report = {"command": _command(), "simulated_s": seconds, "warmup_s": warmup, **assumptions}
        json_file.write_text(_dump(report, rows))
    if plot_file is not None:
        from vllm_hisparse.cli.residency_plot import draw

        draw(rows, plot_file)


def _watch(simulation: Simulation, seconds: float, progress: Progress, title: str) -> None:
    task = progress.add_task(title, total=seconds)
    for now in simulation.steps(seconds):
        progress.update(task, completed=now)
    progress.remove_task(task)


def _row(num_sessions: int, outcome: Outcome) -> dict[str, Any]:
    every = max(1, len(outcome.course) // COURSE_POINTS)
    return {
        "sessions": num_sessions,
        "policy": outcome.policy,
        "mean_decoding": round(outcome.mean_decoding, 1),
        "turns_per_s": round(outcome.turns_per_s, 3),
        "preemptions": outcome.num_preemptions,
        "recomputed_tokens": outcome.recomputed_tokens,
        "to_host_gb": round(outcome.to_host_bytes / GB, 1),
        "missed_gb": round(outcome.missed_bytes / GB, 1),
        "restored_gb": round(outcome.restored_bytes / GB, 1),
        "mean_run_blocks": round(outcome.mean_run, 1),
        "course": [
            [round(second, 1), decoding, waiting] for second, decoding, waiting in outcome.course[::every]
        ],
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="GLM-5.2 on eight H200, agentic sessions, simulated")
    for key, title in COLUMNS:
        table.add_column(title, justify="left" if key == "policy" else "right")
    for row in rows:
        table.add_row(
            *(f"{row[key]:,}" if isinstance(row[key], int) else str(row[key]) for key, _ in COLUMNS)
        )
    return table


def _command() -> str:
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return shlex.join(["vllm-hisparse", *words])


def _dump(report: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Rows on a line each, so that a diff shows which changed."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    return json.dumps(report, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n"
