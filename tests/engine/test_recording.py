"""An engine records its selections, and their replay misses what the engine missed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.engine.workload import ENGINE_ARGS, ModelPath
from vllm_hisparse.cli import simulate, trace
from vllm_hisparse.policies.registry import POLICIES
from vllm_hisparse.policies.replay import replay
from vllm_hisparse.testing.engine import random_prompts
from vllm_hisparse.testing.harness import Prompt, hisparse, hisparse_engine
from vllm_hisparse.testing.models import SHARED, TinyModel
from vllm_hisparse.traces import Trace, load_trace

pytestmark = pytest.mark.engine

MODEL = TinyModel(index_pattern="FSF", index_topk=32)
REGION_ROWS = 64  # a whole block
# Less than a request of the tests takes: its pages go to the host, and none comes back.
SPILL_EVERYTHING = {"low_watermark": 0.98, "high_watermark": 1.0}


def record(model: Path, file: Path, prompts: list[Prompt], **options: Any) -> tuple[Trace, dict[str, int]]:
    """(trace, rows counted by the engine) of an engine that runs `prompts` in regions of one size."""
    transfer = hisparse(trace_path=str(file), **SPILL_EVERYTHING, **options)
    tuning = {"hisparse_config": {"device_buffer_size": REGION_ROWS}}
    arguments = {**ENGINE_ARGS, "kv_transfer_config": transfer, "attention_config": tuning}
    with hisparse_engine(model, num_gpu_blocks_override=28, **arguments) as engine:
        engine.run(prompts)
        engine.finish()
        rows = engine.rows
        assert not file.exists()
    return load_trace(file), rows


@pytest.mark.parametrize(("policy", "replayed"), [("lru", "lru"), ("lrfu", "lrfu-kernel")])
def test_the_replay_misses_what_the_engine_missed(
    model_path: ModelPath, tmp_path: Path, policy: str, replayed: str
) -> None:
    file = tmp_path / "selections.npz"
    (words,) = random_prompts(1, 300, 300, seed=5)
    recorded, rows = record(model_path(MODEL), file, [Prompt(tuple(words), 100)], policy=policy)
    assert recorded.num_streams == 2  # index groups
    assert recorded.num_steps == 99  # the first token comes from the prompt
    assert (recorded.num_selected == MODEL.index_topk).all()
    assert (recorded.newest == 300 + np.arange(99)).all()
    assert (recorded.top <= recorded.newest[..., None]).all()
    result = replay(recorded.only_host(), POLICIES[replayed], REGION_ROWS)
    assert rows["misses"] > 0 and rows["hits"] > 0
    assert (result.loaded.sum(), result.selected.sum()) == (rows["misses"], rows["hits"] + rows["misses"])

    runner = CliRunner()
    shown = runner.invoke(trace.app, ["info", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "99 to 99 a stream" in shown.output
    command = ["policy", str(file), "--rows", str(REGION_ROWS), "--host-only"]
    table = runner.invoke(simulate.app, command)
    assert table.exit_code == 0, table.output
    assert f"{result.miss_percent:.2f}" in table.output


def test_requests_are_recorded_one_after_another(model_path: ModelPath, tmp_path: Path) -> None:
    prompts = [Prompt(tuple(words), 20) for words in random_prompts(3, 100, 120, seed=6)]
    recorded, _ = record(model_path(SHARED), tmp_path / "selections.npz", prompts + [prompts[0]] * 6)
    assert recorded.request is not None and recorded.group is not None
    assert len(np.unique(recorded.request)) > 1
    assert recorded.num_steps == 19


def test_without_a_path_nothing_is_recorded(model_path: ModelPath) -> None:
    with hisparse_engine(model_path(MODEL), kv_transfer_config=hisparse(), **ENGINE_ARGS) as engine:
        assert engine.runtime.recorder is None
