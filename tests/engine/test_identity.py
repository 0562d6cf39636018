"""Under pressure, with every option: tokens and log probabilities are those of an engine without HiSparse."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.engine.null_connector import beside_null_connector
from tests.engine.workload import ENGINE_ARGS, ModelPath, Reference, differences, prompts
from vllm_hisparse.testing.harness import HiSparseEngine, LateCopies, hisparse, hisparse_engine, total_blocks
from vllm_hisparse.testing.models import DEEPSEEK, SEPARATE, SHARED, TinyModel

pytestmark = pytest.mark.engine

PAIRS = TinyModel(index_pattern="FSFS")
AGAIN = slice(2, 7)  # requests whose pages only the host still has when all have ended


@dataclass(frozen=True)
class Case:
    """One engine. `num_parts` and `indexer_pages` are what the planner has to choose for it."""

    name: str
    model: TinyModel
    dtype: str
    num_blocks: int
    num_parts: int = 1
    indexer_pages: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    late_copies: int | None = None  # acknowledgements until a copy is reported as completed
    beside_another: bool = False  # below a MultiConnector
    has_prefix_hits: bool = True


def hot_region(rows: int, **tuning: Any) -> dict[str, Any]:
    """Engine arguments that set vLLM's own HiSparse options."""
    return {"attention_config": {"hisparse_config": {"device_buffer_size": rows, **tuning}}}


CASES = [
    Case("shared-selection-three-parts", SHARED, "float32", num_blocks=48, num_parts=3),
    Case(
        "late-copies-two-parts-multi-connector",
        PAIRS,
        "bfloat16",
        num_blocks=36,
        num_parts=2,
        late_copies=3,
        beside_another=True,
    ),
    Case(
        "synchronous-scheduling-lru-lazy-copies",
        SEPARATE,
        "bfloat16",
        num_blocks=24,
        options={"policy": "lru", "low_watermark": 0.7, "high_watermark": 0.8},
        engine_args={"async_scheduling": False, **hot_region(40, eager_host_mirror=False)},
    ),
    Case(
        "no-prefix-caching-large-indexer-blocks",
        SHARED,
        "float32",
        num_blocks=14,
        indexer_pages=7,
        options={"max_indexer_pages": None},
        engine_args={"enable_prefix_caching": False},
        has_prefix_hits=False,
    ),
]
LONG_CASES = [
    Case("separate-fp32", SEPARATE, "float32", num_blocks=48, num_parts=3, late_copies=1),
    Case("deepseek", DEEPSEEK, "bfloat16", num_blocks=24),
    Case(
        "four-page-indexer-blocks-lru",
        SHARED,
        "bfloat16",
        num_blocks=16,
        indexer_pages=4,
        options={"max_indexer_pages": None, "policy": "lru"},
        late_copies=6,
        has_prefix_hits=False,
    ),
    Case(
        "smallest-hot-region",
        PAIRS,
        "bfloat16",
        num_blocks=36,
        num_parts=2,
        options={"max_hot_rows": 32},
        engine_args={"async_scheduling": False, **hot_region(32)},
    ),
    Case(
        "large-hot-region-lazy-copies",
        SEPARATE,
        "bfloat16",
        num_blocks=24,
        options={"low_watermark": 0.9, "high_watermark": 0.95},
        engine_args=hot_region(128, eager_host_mirror=False),
        late_copies=2,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_bits_under_pressure(case: Case, model_path: ModelPath, reference: Reference) -> None:
    check(case, model_path, reference)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG_CASES, ids=lambda case: case.name)
def test_same_bits_under_pressure_long(case: Case, model_path: ModelPath, reference: Reference) -> None:
    check(case, model_path, reference)


def test_same_bits_layer_by_layer(model_path: ModelPath, reference: Reference) -> None:
    """The option `prefetch` off, with several layers a group in two parts: each layer reads its own rows."""
    expected = reference(SHARED, "float32")
    with hisparse_engine(
        model_path(SHARED),
        dtype="float32",
        num_gpu_blocks_override=48,
        kv_transfer_config=hisparse(prefetch=False),
        **ENGINE_ARGS,
    ) as engine:
        assert max(map(len, engine.coordinator.layout.index_groups)) > 1
        completions = engine.run(prompts(), engine.check_integrity)
        engine.finish()
        assert min(engine.rows["misses"], engine.rows["hits"]) > 0
    assert differences(completions, expected) == []


@pytest.mark.long
def test_same_bits_always_from_the_host(model_path: ModelPath, reference: Reference) -> None:
    """The option `always_host` in a pool that would hold everything."""
    expected = reference(SHARED, "float32")
    with hisparse_engine(
        model_path(SHARED),
        dtype="float32",
        num_gpu_blocks_override=256,
        kv_transfer_config=hisparse(always_host=True, low_watermark=0.0, high_watermark=0.1),
        **ENGINE_ARGS,
    ) as engine:
        completions = engine.run(prompts(), engine.check_integrity)
        engine.finish()
        assert engine.pages["evicted"] > 30
        assert engine.pages["unpinned"] == 0
        assert min(engine.rows["misses"], engine.rows["hits"]) > 0
    assert differences(completions, expected) == []


def check(case: Case, model_path: ModelPath, reference: Reference) -> None:
    expected = reference(case.model, case.dtype)
    transfer = hisparse(**case.options)
    with hisparse_engine(
        model_path(case.model),
        dtype=case.dtype,
        num_gpu_blocks_override=case.num_blocks,
        kv_transfer_config=beside_null_connector(transfer) if case.beside_another else transfer,
        **{**ENGINE_ARGS, **case.engine_args},
    ) as engine:
        check_preconditions(case, engine)
        if case.late_copies is not None:
            engine.use_copies(LateCopies(case.late_copies))
        completions = engine.run(prompts(), engine.check_integrity)
        engine.finish()
        again = engine.run(prompts(8)[AGAIN], engine.check_integrity)
        engine.finish()
        assert engine.pages["spilled"] > 0
        assert engine.pages["lost"] > 0
        assert engine.rows["misses"] > 0
        assert engine.rows["hits"] > 0
        assert (engine.pages["host_hits"] > 0) == case.has_prefix_hits
    assert differences(completions, expected) == []
    assert differences(again, expected[AGAIN]) == []


def check_preconditions(case: Case, engine: HiSparseEngine) -> None:
    layout = engine.coordinator.layout
    assert layout.num_parts == case.num_parts
    assert layout.indexer_pages == case.indexer_pages
    requests = prompts()
    assert len(requests) >= 8
    assert layout.num_device_blocks == case.num_blocks <= total_blocks(requests, layout) / 4
    assert max(len(p.token_ids) for p in requests) > 2 * ENGINE_ARGS["max_num_batched_tokens"]
    size = case.engine_args.get("attention_config", {}).get("hisparse_config", {}).get("device_buffer_size")
    if size is not None:
        assert engine.coordinator.config.start_hot_rows == size
