"""The command line: a registry of subcommands, each in a module of its own."""

import typer

from vllm_hisparse.cli.bench import bench
from vllm_hisparse.cli.demo.command import demo
from vllm_hisparse.cli.doctor.command import doctor
from vllm_hisparse.cli.plan import plan
from vllm_hisparse.cli.simulate import app as simulate
from vllm_hisparse.cli.simulate_residency import residency_command
from vllm_hisparse.cli.trace import app as trace
from vllm_hisparse.cli.version import version

__all__ = ["app"]

app = typer.Typer(
    help="Hierarchical KV for top-k sparse attention: a vLLM plugin.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(plan)
app.command()(doctor)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench)
app.command()(version)
simulate.command("residency")(residency_command)
app.add_typer(simulate, name="simulate")
app.add_typer(trace, name="trace")
