"""Command lines of examples/*/compose.json, made fit for the tiny model on the CPU.

service = services("single-node")["vllm"]
port = free_port()
with server(tiny(service.command, model, port), port, tmp_path / "log", **service.environment) as running:
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.start import Service, read
from vllm_hisparse.config import CONNECTOR, connector_entries
from vllm_hisparse.testing.harness import OPTIONS

__all__ = ["EXAMPLES", "read_option", "services", "tiny", "with_options"]

EXAMPLES = Path(__file__).parents[2] / "examples"
TRANSFER = "--kv-transfer-config"

# Of every tiny `vllm serve`; None: left out.
TINY: dict[str, str | None] = {
    "--host": "127.0.0.1",
    "--tensor-parallel-size": None,
    "--kv-cache-dtype": None,
    "--dtype": "bfloat16",
    "--max-model-len": "512",
    "--max-num-batched-tokens": "96",
    "--max-num-seqs": "8",
    "--num-gpu-blocks-override": "24",
    "--kv-cache-memory-bytes": "64M",
}


def services(example: str, **variables: str) -> dict[str, Service]:
    """Services of an example, by name, with the defaults of its variables unless given here."""
    return read(EXAMPLES / example / "compose.json", variables)


def with_options(command: Sequence[str], options: Mapping[str, str | None]) -> list[str]:
    """The command with options set, added, or left out where the value is None. Every option has a value."""
    result = list(command)
    for name, value in options.items():
        if name in result:
            at = result.index(name)
            del result[at : at + 2]
        if value is not None:
            result += [name, value]
    return result


def read_option(command: Sequence[str], name: str) -> str:
    """Value of an option. Raises ValueError if the command does not have it."""
    return command[list(command).index(name) + 1]


def tiny(
    command: Sequence[str],
    model: Path,
    port: int,
    edit: Callable[[dict[str, Any]], None] = lambda entry: None,
    **options: str | None,
) -> list[str]:
    """A `vllm serve MODEL ...` that this machine can run: another model, small sizes, a pool under pressure.

    `edit` changes each connector's configuration in place. `options` stand before `TINY`, named without
    dashes in front and with underscores.
    """
    assert list(command[:2]) == ["vllm", "serve"], command
    own = {"--" + name.replace("_", "-"): value for name, value in options.items()}
    changed = {**TINY, "--port": str(port), **own}
    if TRANSFER in command:
        transfer = json.loads(read_option(command, TRANSFER))
        for entry in connector_entries(transfer):
            if entry["kv_connector"] == CONNECTOR:
                entry["kv_connector_extra_config"].update(OPTIONS)
            edit(entry)
        changed[TRANSFER] = json.dumps(transfer)
    return with_options(["vllm", "serve", str(model), *command[3:]], changed)
