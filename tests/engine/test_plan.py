"""`vllm-hisparse plan` and a running engine say the same: in its layout, and word by word in its log."""

import json
import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.engine.workload import ModelPath
from vllm_hisparse import connector
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


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plugin logs at start-up, without `HiSparse: `. vLLM resets loggers while it starts."""
    kept: list[str] = []
    info = connector.logger.info

    def keep(text: str, *arguments: Any) -> None:
        kept.append((text % arguments).removeprefix("HiSparse: "))
        info(text, *arguments)

    monkeypatch.setattr(connector.logger, "info", keep)
    return kept


def in_log(pattern: str, lines: list[str]) -> list[Any]:
    """Groups of the one line that the pattern is found in; numbers as numbers."""
    (found,) = [match.groups() for line in lines if (match := re.search(pattern, line))]
    return [float(text) if re.fullmatch(r"[\d.]+", text) else text for text in found]


def assert_logged(lines: list[str], planned: dict[str, Any]) -> None:
    """Every figure of the start-up log is the plan's, to the digits that the log prints."""
    row = rf"device pool: (\d+) blocks of (\d+) bytes, .* (\d+) x {PAGE_TOKENS} tokens .*\((\d+) parts\)"
    keys = ("num_device_blocks", "block_bytes", "indexer_pages", "num_parts")
    assert in_log(row, lines) == [planned[key] for key in keys]
    assert in_log(r"host pool: (\d+) blocks of \d+ bytes, ([\d.]+) GiB", lines) == [
        planned["num_host_blocks"],
        round(planned["used_host_gib"], 2),
    ]
    assert in_log(r"(\d+) hot regions of (\d+) to \d+ rows, (\d+) when granted.*policy (\w+)", lines) == [
        planned["num_regions"],
        planned["floor_hot_rows"],
        planned["start_hot_rows"],
        "lrfu",
    ]
    row = r"at (\d+) tokens: ([\d.]+) admitted at once \((\d+) .* ([\d.]+) decoding \((\d+) each\), ([\d.]+)"
    bounds = {key: planned[key]["value"] for key in ("admission", "steady", "floor")}
    found = in_log(row, lines)
    assert found[0::2] == [planned["context"], planned["admission_blocks"], planned["steady_blocks"]]
    assert found[1::2] == [pytest.approx(value, abs=0.0051) for value in bounds.values()]
    for key, what in (("steady", "decoding"), ("admission", "admission")):
        row = rf"^{what} is limited by (\w+): .*\(device ([\d.]+), host ([\d.]+),.* max_num_seqs (\d+)\)"
        bound = planned[key]
        limit, *figures = in_log(row, lines)
        assert limit == bound["limit"]
        assert figures == [pytest.approx(bound[k], abs=0.0051) for k in ("device", "host", "max_num_seqs")]


@pytest.mark.parametrize("model", [SEPARATE, SHARED], ids=["separate", "shared"])
def test_with_hisparse(model: TinyModel, model_path: ModelPath, lines: list[str]) -> None:
    path = model_path(model)
    with hisparse_engine(path, **ENGINE, kv_transfer_config=hisparse()) as running:
        vllm_config, layout = running.core.vllm_config, running.coordinator.layout
        planned = run_plan(str(path), vllm_config)
        assert planned["num_device_blocks"] == layout.num_device_blocks
        assert planned["num_host_blocks"] == layout.num_host_blocks
        assert planned["num_regions"] == layout.num_regions
        for key, blocks in (("steady", None), ("floor", layout.floor_hot_blocks)):
            bound = steady_state(vllm_config, layout, blocks)
            assert planned[key]["value"] == pytest.approx(float(bound.value), abs=1e-4)
            assert planned[key]["limit"] == bound.limit
    assert_logged(lines, planned)


def test_without_hisparse(model_path: ModelPath) -> None:
    path = model_path(SEPARATE)
    with engine(path, **ENGINE) as llm:
        core = llm.llm_engine.engine_core.engine_core
        planned = run_plan(str(path), core.vllm_config)
        pages = ENGINE["max_model_len"] / PAGE_TOKENS
        logged = core.scheduler.kv_cache_config.num_blocks / pages
        assert planned["plain"]["device"] == pytest.approx(logged, rel=0.02)
