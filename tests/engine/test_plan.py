"""`vllm-hisparse plan` and a running engine say the same."""

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.engine.workload import ModelPath
from vllm_hisparse.cli.plan import plan
from vllm_hisparse.planning.report import steady_state
from vllm_hisparse.testing.engine import engine
from vllm_hisparse.testing.harness import hisparse, hisparse_engine
from vllm_hisparse.testing.models import SEPARATE, SHARED, TinyModel

pytestmark = pytest.mark.engine

KV_BYTES = 48 << 20
ENGINE: dict[str, Any] = {
    "max_model_len": 4096,
    "kv_cache_memory_bytes": KV_BYTES,
    "num_gpu_blocks_override": None,
}
PAGE_TOKENS = 64


def run_plan(model: str, vllm_config: Any) -> dict[str, Any]:
    app = typer.Typer()
    app.command()(plan)
    scheduler = vllm_config.scheduler_config
    arguments = {
        "--kv-gib": KV_BYTES / 2**30,
        "--kv-dtype": "fp32",
        "--context": ENGINE["max_model_len"],
        "--host-pool-gib": 0.05,
        "--max-num-seqs": scheduler.max_num_seqs,
        "--max-num-batched-tokens": scheduler.max_num_batched_tokens,
    }
    words = [model, *(str(word) for pair in arguments.items() for word in pair), "--json"]
    words += ["--option", "prefill_staging_mib=8", "--option", "max_indexer_pages=1"]
    if not scheduler.async_scheduling:
        words.append("--no-async-scheduling")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.output)
    return content


@pytest.mark.parametrize("model", [SEPARATE, SHARED], ids=["separate", "shared"])
def test_with_hisparse(model: TinyModel, model_path: ModelPath) -> None:
    path = model_path(model)
    with hisparse_engine(path, **ENGINE, kv_transfer_config=hisparse()) as running:
        vllm_config, layout = running.core.vllm_config, running.coordinator.layout
        planned = run_plan(str(path), vllm_config)
        assert planned["num_device_blocks"] == layout.num_device_blocks
        assert planned["num_host_blocks"] == layout.num_host_blocks
        assert planned["num_regions"] == layout.num_regions
        for key, blocks in (("steady", None), ("floor", layout.floor_hot_blocks)):
            logged = steady_state(vllm_config, layout, blocks)
            assert planned[key]["value"] == pytest.approx(float(logged.value), rel=0.02)
            assert planned[key]["limit"] == logged.limit


def test_without_hisparse(model_path: ModelPath) -> None:
    path = model_path(SEPARATE)
    with engine(path, **ENGINE) as llm:
        core = llm.llm_engine.engine_core.engine_core
        planned = run_plan(str(path), core.vllm_config)
        pages = ENGINE["max_model_len"] / PAGE_TOKENS
        logged = core.scheduler.kv_cache_config.num_blocks / pages
        assert planned["plain"]["device"] == pytest.approx(logged, rel=0.02)
