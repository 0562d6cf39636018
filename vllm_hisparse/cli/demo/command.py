"""`vllm-hisparse demo`."""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from vllm_hisparse.cli.demo.frames import Frame, Mode, Started
from vllm_hisparse.cli.demo.lines import Lines
from vllm_hisparse.cli.demo.process import DemoError, EngineProcess
from vllm_hisparse.cli.demo.progress import Progress
from vllm_hisparse.cli.demo.summary import report, table
from vllm_hisparse.cli.demo.view import View, header, timeline
from vllm_hisparse.cli.signals import Stopped, note_signals

__all__ = ["demo", "run_demo"]

DIFFERENT, FAILED = 1, 2


def demo(
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the figures as one JSON object on stdout; progress goes to stderr."
        ),
    ] = False,
) -> None:
    """Two growing requests in a pool too small for both: plain vLLM against HiSparse, on a real engine."""
    raise typer.Exit(run_demo(as_json))


def run_demo(as_json: bool) -> int:
    """Runs the demo. Returns the exit code: 1 if outputs differ, 2 if an engine failed, 130 after Ctrl-C."""
    console = Console(stderr=as_json)
    progress, began = Progress(), time.monotonic()
    with note_signals() as check, ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="vllm-hisparse-demo-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        log_path = directory / "engine.log"
        try:
            _show_runs(progress, console, directory, log_path, check)
        except DemoError as error:
            stack.pop_all()
            console.print(Text(f"demo: {error}", "bold red"), soft_wrap=True)
            console.print(f"demo: vLLM's log is {log_path}", highlight=False, soft_wrap=True)
            return FAILED
        except Stopped as stopped:
            console.print("demo: stopped")
            return stopped.status
    return _conclude(progress, console, as_json, time.monotonic() - began)


def _show_runs(
    progress: Progress, console: Console, directory: Path, log_path: Path, check: Callable[[], None]
) -> None:
    if not console.is_terminal:
        lines = Lines(progress, console)
        run_engines(progress, directory, log_path, lines.show, check)
        return
    with Live(View(progress), console=console, refresh_per_second=10, transient=True):
        run_engines(progress, directory, log_path, lambda frame: None, check)


def run_engines(
    progress: Progress,
    directory: Path,
    log_path: Path,
    show: Callable[[Frame], None],
    check: Callable[[], None],
) -> None:
    """The three runs, one after the other; `show` is called after every frame, `check` often.

    While one runs the next is made ready. Raises DemoError if an engine fails, and what `check` raises. No
    engine is left behind.
    """
    with ExitStack() as stack:

        def start(mode: Mode) -> EngineProcess:
            engine = EngineProcess(mode, directory, log_path)
            stack.callback(engine.stop)
            return engine

        modes = list(Mode)
        engine = start(modes.pop(0))
        while True:
            following = None
            for frame in engine.frames(check):
                progress.add(engine.mode, frame)
                show(frame)
                if isinstance(frame, Started):
                    engine.go()
                    following = start(modes.pop(0)) if modes else None
            engine.stop()  # it has nothing left to say; vLLM takes seconds to end by itself
            if following is None:
                return
            engine = following


def _conclude(progress: Progress, console: Console, as_json: bool, seconds: float) -> int:
    figures = report(progress)
    figures["seconds"]["total"] = round(seconds, 2)
    if console.is_terminal:
        console.print(header(progress))
        console.print(timeline(progress, console.width))
    console.print(table(figures))
    if figures["identical"]:
        console.print("outputs identical to full residency: yes", style="bold green", highlight=False)
        console.print(f"tokens and log-probabilities, bit by bit; {seconds:.0f} s in all", highlight=False)
    else:
        console.print("outputs identical to full residency: NO", style="bold red", highlight=False)
        console.print(f"first difference: {figures['difference']}", highlight=False, soft_wrap=True)
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
    return 0 if figures["identical"] else DIFFERENT
