"""examples/pd-nixl: two engines and a proxy give the answer of one engine, with an imported prompt."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engine.workload import ModelPath
from tests.examples.compose import EXAMPLES, services, tiny
from tests.servers import Server, free_port, server
from vllm_hisparse.testing.models import SEPARATE

pytest.importorskip("nixl")
pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(400)]

PROMPT = " ".join(f"w{i % 500 + 3}" for i in range(7, 307))


def ask(running: Server) -> str:
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = running.post("/v1/completions", body)
    assert answer["usage"]["prompt_tokens"] == 300
    return str(answer["choices"][0]["text"])


def on_the_cpu(entry: dict[str, Any]) -> None:
    if "Nixl" in entry["kv_connector"]:
        entry["kv_buffer_device"] = "cpu"


def test_answer_is_that_of_one_engine(model_path: ModelPath, tmp_path: Path) -> None:
    ports = {name: str(free_port()) for name in ("PORT", "PREFILL_PORT", "DECODE_PORT", "SIDE_CHANNEL_PORT")}
    found = services("pd-nixl", **ports)
    with ExitStack() as stack:
        running = {}
        for name in ("prefill", "decode"):
            service, port = found[name], int(ports[f"{name.upper()}_PORT"])
            command = tiny(service.command, model_path(SEPARATE), port, on_the_cpu)
            environment = service.environment | {"CUDA_VISIBLE_DEVICES": ""}
            running[name] = stack.enter_context(server(command, port, tmp_path / name, **environment))
        port = int(ports["PORT"])
        command = [word.replace("examples/", f"{EXAMPLES}/") for word in found["proxy"].command]
        running["proxy"] = stack.enter_context(server(command, port, tmp_path / "proxy"))
        for name in ("prefill", "decode", "proxy"):
            running[name].wait_until_ready()
        answer = ask(running["proxy"])
        assert len(answer.split()) == 8
        assert answer == ask(running["prefill"])
        assert running["decode"].counter("vllm:hisparse_imports_total") >= 2  # admitted and arrived
        assert running["decode"].counter("vllm:external_prefix_cache_hits_total") > 200
        assert "vllm:hisparse_imports_total" in running["proxy"].get("/metrics")
        for name in ("decode", "prefill"):
            running[name].check_stop()
        assert os.path.exists(tmp_path / "proxy")
