"""What a user gets wrong surfaces as one ValueError from `LLM(...)`, before any KV memory is allocated."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.workload import ENGINE_ARGS, ModelPath
from tests.leftovers import globals_of_an_engine
from vllm_hisparse.runtime.memory import Memory
from vllm_hisparse.testing.engine import engine
from vllm_hisparse.testing.harness import hisparse, multi
from vllm_hisparse.testing.models import SEPARATE
from vllm_hisparse.testing.offloading import offloading

pytestmark = pytest.mark.engine

MISTAKES = [
    pytest.param(
        {"kv_transfer_config": hisparse(host_pool_gb=1)}, r"unknown options \['host_pool_gb'\]", id="unknown"
    ),
    pytest.param({"kv_transfer_config": hisparse(host_pool_gib=None)}, "no host_pool_gib", id="no-host-pool"),
    pytest.param(
        {"kv_transfer_config": hisparse(host_pool_gib=0.0001)}, "lower max_model_len", id="host-pool-small"
    ),
    pytest.param(
        {"kv_transfer_config": multi(offloading(), hisparse())}, "before HiSparseConnector", id="not-first"
    ),
    pytest.param(
        {"kv_transfer_config": multi(hisparse(), offloading()), "enable_prefix_caching": False},
        "OffloadingConnector with --no-enable-prefix-caching",
        id="keys-without-prefixes",
    ),
    pytest.param(
        {"kv_transfer_config": multi(multi(hisparse()))},
        "without attention_config.hisparse_config",
        id="nested",
    ),
    pytest.param({"pipeline_parallel_size": 2}, "got pipeline_parallel_size=2; need 1", id="pp"),
    pytest.param(
        {"compilation_config": {"cudagraph_mode": "FULL"}}, "got cudagraph_mode=FULL", id="full-graphs"
    ),
    pytest.param(
        {"scheduler_reserve_full_isl": False}, "no-scheduler-reserve-full-isl; need", id="chunked-admission"
    ),
]


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        pytest.fail("KV memory was allocated")

    monkeypatch.setattr(Memory, "__init__", refuse)


@pytest.mark.parametrize(("engine_args", "message"), MISTAKES)
def test_mistake_is_named(engine_args: dict[str, Any], message: str, model_path: ModelPath) -> None:
    with (
        pytest.raises(ValueError, match=message) as caught,
        engine(model_path(SEPARATE), **{"kv_transfer_config": hisparse(), **ENGINE_ARGS, **engine_args}),
    ):
        pass
    assert str(caught.value).count("; need ") == 1, "one error, in the one form"


def test_model_without_an_indexer(model_path: ModelPath, tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    shutil.copytree(model_path(SEPARATE), dense)
    config = json.loads((dense / "config.json").read_text())
    config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    kept = {key: value for key, value in config.items() if not key.startswith("index")}
    (dense / "config.json").write_text(json.dumps(kept))
    with (
        pytest.raises(ValueError, match="without index_topk; need a DSA model"),
        engine(dense, kv_transfer_config=hisparse(), **ENGINE_ARGS),
    ):
        pass


def test_an_engine_that_fails_to_start_leaves_nothing(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late, when its workers have a connector: one that the next engine finds would be the next one's."""

    def fail(*args: Any) -> None:
        raise ValueError("got no memory; need some because it is a test")

    monkeypatch.setattr(Memory, "__init__", fail)
    for _ in range(2):
        with (
            pytest.raises(ValueError, match="got no memory"),
            engine(model_path(SEPARATE), kv_transfer_config=hisparse(), **ENGINE_ARGS),
        ):
            pass
        assert globals_of_an_engine() == []
