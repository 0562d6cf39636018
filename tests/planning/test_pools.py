"""Pool sizes and the KVCacheConfig: what fits, what is set aside, what is refused."""

from typing import Any

import pytest

from tests.planning.engines import PATTERNS, connector, engine, kv_layout, layer_specs, multi
from vllm_hisparse.config import GIB
from vllm_hisparse.planning.bounds import request_blocks
from vllm_hisparse.planning.groups import kv_cache_groups
from vllm_hisparse.planning.layout import Layout, layout_from
from vllm_hisparse.planning.pools import device_overhead_bytes, host_pool_bytes, kv_cache_config
from vllm_hisparse.planning.specs import ResidentSpec

TINY_STRIDE = 341120
TINY_HOST_BLOCK = 8 * 64 * 656


def plan(vllm_config: Any, memory: int, host: int = GIB, pattern: str = PATTERNS["glm-tiny"]) -> Any:
    groups = kv_cache_groups(vllm_config, layer_specs(pattern))
    assert groups is not None
    return kv_cache_config(vllm_config, groups, memory, host)


def test_sizes() -> None:
    vllm_config = engine()
    config = plan(vllm_config, 4 * GIB)
    layout = layout_from(vllm_config, config)
    overhead = device_overhead_bytes(vllm_config, layout, layout.num_regions)
    assert layout.num_regions == 64
    state = 64 * 8 * (2 * 65536 + 8 * 8192 + 4)
    tables = 4 * (2 * 64 * 1024 + 64 * 128)
    results = 4 * (8192 * 2048 + 2 * 64 * 2048)
    staging = 1024 * 64 * 656  # the pages of one request, less than 256 MiB
    assert overhead == state + tables + results + staging + 64 * 656
    assert config.num_blocks == (4 * GIB - overhead) // TINY_STRIDE
    assert config.num_blocks * TINY_STRIDE + overhead <= 4 * GIB
    assert config.hisparse_host_num_blocks == GIB // TINY_HOST_BLOCK
    assert config.hisparse_host_block_stride == TINY_HOST_BLOCK
    assert config.hisparse_shared_host_pool is False
    assert [group.host_resident for group in config.kv_cache_groups] == [True, False, False]


def test_tensors_say_where_pages_are() -> None:
    config = plan(engine(), 4 * GIB, pattern="FSSSFSSS")
    host = [t for t in config.kv_cache_tensors if t.host_resident]
    device = [t for t in config.kv_cache_tensors if not t.host_resident]
    assert [len(t.layers) for t in host] == [4, 4]
    assert [t.offset for t in host] == [0, config.hisparse_host_num_blocks * 64 * 4 * 656]
    assert {(t.layer_stride, t.block_stride, t.size) for t in host} == {
        (656, 64 * 4 * 656, config.hisparse_host_num_blocks * TINY_HOST_BLOCK)
    }
    assert [len(t.layers) for t in device] == [2, 2, 2, 2, 2]
    assert {(t.block_stride, t.size, t.offset) for t in device} == {(85280, config.num_blocks * 85280, 0)}
    assert [t.layer_stride for t in device] == [8448] + [64 * 656] * 4
    names = [name for group in config.kv_cache_groups for name in group.layer_names]
    assert sorted(names) == sorted(name for t in config.kv_cache_tensors for name in t.layers)


def test_override_sizes_the_device_pool_and_not_the_host_pool() -> None:
    for memory in (0, 8 * GIB):
        config = plan(engine(num_gpu_blocks_override=700), memory)
        assert config.num_blocks == 700
        assert config.hisparse_host_num_blocks == GIB // TINY_HOST_BLOCK
    assert plan(engine(num_gpu_blocks_override=700), 16 * TINY_STRIDE).num_blocks == 16


def test_planning_again_with_a_smaller_pool_takes_nothing_away() -> None:
    """vLLM does so for ranks with more memory than the poorest; all must end with one size."""
    vllm_config = engine()
    config = plan(vllm_config, 4 * GIB)
    again = kv_cache_config(vllm_config, config.kv_cache_groups, (config.num_blocks - 5) * TINY_STRIDE, GIB)
    assert again.num_blocks == config.num_blocks - 5
    assert again.kv_cache_groups == config.kv_cache_groups
    assert all(
        group.kv_cache_spec.memory_reserved
        for group in config.kv_cache_groups
        if isinstance(group.kv_cache_spec, ResidentSpec)
    )


def test_a_pool_for_measuring_graphs_has_the_size_asked_for() -> None:
    assert plan(engine(), 64 * TINY_STRIDE).num_blocks == 64


def test_host_pool_bytes_of_a_nested_connector() -> None:
    assert host_pool_bytes(engine(multi(multi(connector(host_pool_gib=2.5))))) == 5 * GIB // 2


def test_host_pool_must_hold_the_longest_request() -> None:
    needed = 65536 // 64 + 2
    assert plan(engine(), 4 * GIB, needed * TINY_HOST_BLOCK).hisparse_host_num_blocks == needed
    with pytest.raises(
        ValueError, match=r"^got host_pool_gib=0.\d+: 1025 host blocks of 335872 bytes; need 1026 "
    ):
        plan(engine(), 4 * GIB, needed * TINY_HOST_BLOCK - 1)


def test_host_rows_stay_within_int32() -> None:
    config = plan(engine(), 4 * GIB, 1 << 42)
    assert config.hisparse_host_num_blocks * 64 < 1 << 31


def test_a_layout_by_layers_is_refused() -> None:
    vllm_config = engine()
    vllm_config.cache_config.get_resolved_kv_cache_layout = lambda: kv_layout("LBNHC")
    with pytest.raises(ValueError, match=r"^got KV cache layout LBNHC; need a block-outermost one"):
        plan(vllm_config, 4 * GIB)


def test_the_layout_holds_what_requests_need() -> None:
    vllm_config = engine(max_model_len=1000, max_num_seqs=5)
    layout = layout_from(vllm_config, plan(vllm_config, 4 * GIB))
    need = request_blocks(vllm_config, layout)
    assert isinstance(layout, Layout)
    assert (layout.max_requests, layout.max_positions, layout.max_pages) == (5, 1000, 16)
    assert layout.floor_hot_blocks == layout.start_hot_blocks == layout.max_hot_blocks == 16
    assert (layout.tail_pages, layout.admission_pages) == (need.tail_pages, need.admission_pages) == (2, 16)
    assert layout.num_regions == 5


def test_state_is_set_aside_evenly() -> None:
    """One region more never takes blocks from a pool that has grown by less, and all of them fit."""
    vllm_config = engine(max_num_seqs=1000)
    groups = kv_cache_groups(vllm_config, layer_specs(PATTERNS["glm-tiny"]))
    assert groups is not None
    previous = 0
    for memory in range(2 * GIB, 2 * GIB + 50 * TINY_STRIDE, TINY_STRIDE // 3):
        config = kv_cache_config(vllm_config, groups, memory, GIB)
        assert config.num_blocks >= previous
        previous = config.num_blocks
        layout = layout_from(vllm_config, config)
        beside = device_overhead_bytes(vllm_config, layout, layout.num_regions)
        assert config.num_blocks * TINY_STRIDE + beside <= memory
