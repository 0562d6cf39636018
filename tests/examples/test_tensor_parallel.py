"""examples/tensor-parallel-8 with two replicas of two ranks: one pool a replica, kept apart in metrics."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.workload import ModelPath
from tests.examples.compose import services, tiny
from tests.servers import Server, free_port, server
from vllm_hisparse.runtime.host_sharing import NAME
from vllm_hisparse.testing.models import SEPARATE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

NUM_REQUESTS = 8
# vLLM's CPU build cannot exchange tokens of experts between replicas.
DENSE = replace(SEPARATE, widths=replace(SEPARATE.widths, dense_layers=len(SEPARATE.index_pattern)))


def pools(group: int) -> list[str]:
    """Inodes of the pools that the processes of a process group have mapped, one a process, sorted."""
    return sorted(inode for process in Path("/proc").glob("[0-9]*") for inode in _mapped(process, group))


def _mapped(process: Path, group: int) -> set[str]:
    try:
        if os.getpgid(int(process.name)) != group:
            return set()
        maps = (process / "maps").read_text().splitlines()
    except OSError:
        return set()  # gone meanwhile
    return {line.split()[4] for line in maps if NAME in line}


def decode_from_host(entry: dict[str, Any]) -> None:
    """Rows are missed however the requests arrive and whichever replica they go to."""
    entry["kv_connector_extra_config"]["always_host"] = True


def answer(running: Server, number: int) -> str:
    prompt = " ".join(f"w{i}" for i in range(3 + number, 303 + number))
    body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return str(running.post("/v1/completions", body)["choices"][0]["text"])


def test_replicas_have_a_pool_each(model_path: ModelPath, tmp_path: Path) -> None:
    service = services("tensor-parallel-8", GPUS="2", REPLICAS="2")["vllm"]
    port = free_port()
    parallel = {"tensor_parallel_size": "2", "api_server_count": "1"}
    command = tiny(service.command, model_path(DENSE), port, decode_from_host, **parallel)
    with server(command, port, tmp_path / "log", **service.environment) as running:
        running.wait_until_ready()
        assert running.log.count("one for 2 ranks") == 2
        found = pools(running.process.pid)
        assert len(found) == 4 and found[0] == found[1] != found[2] == found[3]
        with ThreadPoolExecutor(NUM_REQUESTS) as clients:
            first = list(clients.map(lambda i: answer(running, i % 4), range(NUM_REQUESTS)))
        assert first[:4] == first[4:], "replicas answer alike"
        assert len(set(first)) == 4
        scraped = running.get("/metrics").splitlines()
        for engine in ("0", "1"):
            own = [line for line in scraped if f'engine="{engine}"' in line]
            for metric in ("spilled_bytes", "misses"):
                counted = [line for line in own if line.startswith(f"vllm:hisparse_{metric}_total")]
                assert sum(float(line.split()[-1]) for line in counted) > 0, (engine, metric)
        running.check_stop()
    assert pools(running.process.pid) == []
