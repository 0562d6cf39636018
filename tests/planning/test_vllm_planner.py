"""Our functions in the place of vLLM's, driven by vLLM's own planner."""

import copy
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from tests.planning.engines import PATTERNS, engine, layer_specs
from vllm_hisparse.config import GIB
from vllm_hisparse.planning import groups, pools
from vllm_hisparse.planning.layout import layout_from
from vllm_hisparse.planning.specs import ResidentSpec, resident_name

Plan = Callable[[Any, dict[str, KVCacheSpec], list[int]], list[KVCacheConfig]]
PLANNER = "vllm.v1.core.kv_cache_planning"  # 0.33
if importlib.util.find_spec(PLANNER) is None:
    PLANNER = "vllm.v1.core.kv_cache_utils"  # 0.32
planner = importlib.import_module(PLANNER)


def register_resident_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives ResidentSpec a manager for one test, whether or not the plugin has registered its own."""
    from vllm.v1 import kv_cache_spec_registry as registry

    registry.KVCacheSpecRegistry._ensure_registered()
    entry = registry.KVCacheSpecMetadata(ResidentSpec, FullAttentionManager, ResidentSpec)
    monkeypatch.setitem(registry._REGISTRY_KVCACHESPEC_LIST, ResidentSpec, entry)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """vLLM's planner over ours: one specs dict for all ranks, and the device memory of each."""
    monkeypatch.setattr(planner, "get_hisparse_kv_cache_groups", groups.kv_cache_groups)
    monkeypatch.setattr(planner, "get_hisparse_kv_cache_config", pools.kv_cache_config)
    register_resident_manager(monkeypatch)

    def run(vllm_config: Any, specs: dict[str, KVCacheSpec], memory: list[int]) -> list[KVCacheConfig]:
        resolved = resolve(vllm_config, specs)
        per_rank = [copy.deepcopy(resolved) for _ in memory]
        more = {}
        if hasattr(planner, "get_global_kv_cache_groups"):
            more["global_kv_cache_groups"] = planner.get_global_kv_cache_groups(vllm_config, per_rank)
        configs: list[KVCacheConfig] = planner.get_kv_cache_configs(vllm_config, per_rank, memory, **more)
        return configs

    return run


def resolve(vllm_config: Any, specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    class Backend:
        @staticmethod
        def get_supported_kernel_block_sizes(spec: Any = None) -> list[int]:
            return [64]

    class Layer:
        @staticmethod
        def get_attn_backend() -> type[Backend]:
            return Backend

    return groups.resolve_specs(vllm_config, specs, dict.fromkeys(specs, Layer))


@pytest.mark.parametrize("model", PATTERNS)
@pytest.mark.parametrize("row_bytes", [656, 1152])
def test_vllm_arrives_at_our_block_stride(plan: Plan, model: str, row_bytes: int) -> None:
    vllm_config = engine(host_pool_gib=32)
    (config,) = plan(vllm_config, layer_specs(PATTERNS[model], row_bytes), [40 * GIB])
    layout = layout_from(vllm_config, config)
    device = [group for group in config.kv_cache_groups if not group.host_resident]
    kv_layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    assert planner._get_kv_cache_bytes_per_block(device, kv_layout) == layout.block_stride_bytes
    assert planner._pool_bytes_per_block(vllm_config, config.kv_cache_groups) == layout.block_stride_bytes
    assert layout.device_pool_bytes <= 40 * GIB


def test_scheduler_and_worker_see_one_layout(plan: Plan) -> None:
    """The scheduler's config keeps one spec a group: the layout must not depend on the others."""
    vllm_config = engine(host_pool_gib=32)
    configs = plan(vllm_config, layer_specs(PATTERNS["glm-5.2"]), [40 * GIB, 41 * GIB])
    scheduler = generate_scheduler_kv_cache_config(configs)
    want = layout_from(vllm_config, configs[0])
    assert layout_from(vllm_config, scheduler) == layout_from(vllm_config, configs[1]) == want
    assert [group.kv_cache_spec.block_size for group in scheduler.kv_cache_groups] == [64, 192] + [64] * 6


def test_ranks_with_different_memory_end_with_one_pool(plan: Plan) -> None:
    vllm_config = engine()
    configs = plan(vllm_config, layer_specs(PATTERNS["glm-tiny"]), [4 * GIB, 3 * GIB, 3 * GIB + 1])
    alone = plan(vllm_config, layer_specs(PATTERNS["glm-tiny"]), [3 * GIB])
    assert {config.num_blocks for config in configs} == {alone[0].num_blocks}
    assert {config.hisparse_host_num_blocks for config in configs} == {GIB // (8 * 64 * 656)}


def test_override(plan: Plan) -> None:
    vllm_config = engine(num_gpu_blocks_override=600)
    small = plan(vllm_config, layer_specs(PATTERNS["glm-tiny"]), [GIB])
    large = plan(vllm_config, layer_specs(PATTERNS["glm-tiny"]), [64 * GIB])
    for (config,) in (small, large):
        assert config.num_blocks == 600
        assert config.hisparse_host_num_blocks == GIB // (8 * 64 * 656)


def test_a_request_longer_than_the_pool_is_admitted(plan: Plan) -> None:
    """65,536 tokens are 1024 pages and 205 indexer blocks; 600 blocks do, of which it needs 205 + 290."""
    vllm_config = engine(num_gpu_blocks_override=600)
    (config,) = plan(vllm_config, layer_specs(PATTERNS["glm-tiny"]), [GIB])
    layout = layout_from(vllm_config, config)
    assert layout.max_pages > config.num_blocks
    with pytest.raises(ValueError, match="KV cache"):
        plan(engine(num_gpu_blocks_override=400), layer_specs(PATTERNS["glm-tiny"]), [GIB])


def test_every_pseudo_layer_is_in_the_workers_specs() -> None:
    vllm_config = engine()
    specs = layer_specs("FSF")
    resolved = resolve(vllm_config, specs)
    assert set(resolved) == set(specs) | {resident_name(n) for n in specs if "indexer" not in n}
    assert {spec.dtype for n, spec in resolved.items() if n in specs} == {torch.uint8}
