"""`vllm-hisparse bench`: the scripts of examples/bench, in a source tree."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import vllm_hisparse

__all__ = ["bench", "benchmarks"]

SCRIPTS = Path(vllm_hisparse.__file__).parents[1] / "examples" / "bench"
COMMAND_LINE = "ArgumentParser("  # what a module that others share or start has not


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A script of examples/bench; its own options follow.")] = "",
) -> None:
    """Run a benchmark of the source tree; without a name, list them."""
    found = benchmarks()
    if not found:
        typer.echo(
            f"got no {SCRIPTS}; need a source tree because benchmarks are not part of the package", err=True
        )
        raise typer.Exit(2)
    if not name:
        typer.echo("\n".join(found))
        return
    if name not in found:
        typer.echo(f"got benchmark {name!r}; need one of {', '.join(found)}", err=True)
        raise typer.Exit(2)
    # In place of this process: a parent would be interrupted with the script, and kill it while it ends.
    os.execv(sys.executable, [sys.executable, str(found[name]), *context.args])


def benchmarks() -> dict[str, Path]:
    """Scripts by name."""
    return {path.stem: path for path in sorted(SCRIPTS.glob("*.py")) if COMMAND_LINE in path.read_text()}
