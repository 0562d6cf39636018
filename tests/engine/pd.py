"""Two engines: one computes prompts in a program of its own, the other reads their pages over NIXL."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engine.processes import environment
from tests.servers import free_port
from vllm_hisparse.testing.harness import Prompt

__all__ = ["PLAIN", "RemoteProducer", "producer", "with_nixl"]

PLAIN = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu"}


def with_nixl(transfer: dict[str, Any], role: str, policy: str = "fail", **options: Any) -> dict[str, Any]:
    """A MultiConnector with HiSparse, configured by `transfer`, and HiSparseNixlConnector."""
    nixl = {
        "kv_connector": "HiSparseNixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": options,
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [transfer, nixl]},
    }


class RemoteProducer:
    """The other side of `producer.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line of the program."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the producer has ended"
        return json.loads(line)

    def prefill(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """kv_transfer_params of each prompt, computed and lent."""
        return self.ask({"prefill": [list(p.token_ids) for p in prompts]})["params"]

    @property
    def num_held(self) -> int:
        """Requests whose pages are still lent."""
        return self.ask({"held": True})["held"]

    @property
    def num_leaked(self) -> int:
        """Blocks that are leased, to be asked when nothing is lent any more."""
        return self.ask({"check": True})["leaked"]


@contextmanager
def producer(
    model: Path, log: Path, transfer: dict[str, Any], **engine_args: Any
) -> Iterator[RemoteProducer]:
    """An engine that lends pages, killed on exit."""
    options = {"dtype": "bfloat16", "kv_transfer_config": transfer, **engine_args}
    program = [sys.executable, "-m", "tests.engine.producer", str(model), json.dumps(options)]
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            env=environment(**variables),
            cwd=Path(__file__).parents[2],
        )
        try:
            remote = RemoteProducer(process)
            assert remote.answer() == {"ready": True}, log.read_text()
            yield remote
        finally:
            process.kill()
            process.wait()
