"""Indexer blocks of several pages inside vLLM: block tables, slots, prefix hits, connectors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from tests.planning.engines import PATTERNS, engine, layer_specs
from vllm_hisparse.config import GIB
from vllm_hisparse.planning.groups import kv_cache_groups
from vllm_hisparse.planning.layout import Layout, layout_from
from vllm_hisparse.planning.pools import kv_cache_config

KEY_BYTES = 132


def planned(pattern: str = PATTERNS["glm-5.2"], **changes: Any) -> tuple[Any, KVCacheConfig, Layout]:
    vllm_config = engine(num_gpu_blocks_override=5, max_model_len=4096, **changes)
    groups = kv_cache_groups(vllm_config, layer_specs(pattern))
    assert groups is not None
    config = kv_cache_config(vllm_config, groups, 0, GIB)
    return vllm_config, config, layout_from(vllm_config, config)


def page_views(layout: Layout, pool: torch.Tensor) -> list[torch.Tensor]:
    """What indexer layers read: [pages, 1, page_tokens, key] each."""
    shape = (layout.num_device_blocks * layout.indexer_pages, 1, layout.page_tokens, KEY_BYTES)
    strides = (layout.indexer_stride_bytes, layout.page_tokens * KEY_BYTES, KEY_BYTES, 1)
    return [pool.as_strided(shape, strides, offset) for offset in layout.indexer_offset]


def share_views(layout: Layout, pool: torch.Tensor) -> list[torch.Tensor]:
    """What connectors that save blocks get: [blocks, 1, page_tokens, key], from each layer's share on."""
    shape = (layout.num_device_blocks, 1, layout.page_tokens, KEY_BYTES)
    strides = (layout.block_stride_bytes, layout.page_tokens * KEY_BYTES, KEY_BYTES, 1)
    return [pool.as_strided(shape, strides, offset) for offset in layout.indexer_share_offset]


class Builder:
    """Metadata builder that keeps the spec it was made for."""

    requires_block_table_width = False

    def __init__(self, spec: Any, *_: Any, **__: Any) -> None:
        self.spec = spec


class Backend:
    @staticmethod
    def get_supported_kernel_block_sizes(spec: Any = None) -> list[int]:
        return [64]

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


def test_vllm_maps_blocks_to_pages() -> None:
    """Page j of block b becomes kernel block 3 b + j, and our views are bound as they are."""
    from vllm.v1.worker.utils import (
        AttentionGroup,
        map_kv_caches_to_kernel_blocks,
        prepare_kernel_block_sizes,
    )

    vllm_config, config, layout = planned()
    indexer = config.kv_cache_groups[1]
    spec = next(iter(indexer.kv_cache_spec.kv_cache_specs.values()))
    groups = [[AttentionGroup(Backend, indexer.layer_names, spec, 1)] if i == 1 else [] for i in range(8)]
    source = config.kv_cache_groups[0]
    source_spec = next(iter(source.kv_cache_spec.kv_cache_specs.values()))
    groups[0] = [AttentionGroup(Backend, source.layer_names, source_spec, 0)]
    sizes = prepare_kernel_block_sizes(config, groups)
    assert sizes == [64, 192] + [64] * 6
    (group,) = groups[1]
    group.create_metadata_builders(vllm_config, torch.device("cpu"), kernel_block_size=sizes[1])
    assert group.kernel_block_size == 64
    assert group.get_metadata_builder().spec.block_size == 64
    table = torch.tensor([[4, 0, 2]], dtype=torch.int32)
    mapped = group.map_to_kernel_block_table(table)
    assert mapped.tolist() == [[12, 13, 14, 0, 1, 2, 6, 7, 8]]
    pool = torch.zeros(layout.device_pool_bytes, dtype=torch.uint8)
    views = dict(zip(layout.indexer_layers, page_views(layout, pool), strict=True))
    bound = map_kv_caches_to_kernel_blocks(views, groups[1])
    assert all(bound[name] is view for name, view in views.items())


def test_slots_of_blocks_are_slots_of_pages() -> None:
    """A slot counts tokens of blocks; read as tokens of pages it gives the same row, in the layer's bytes."""
    _, _, layout = planned()
    pool = torch.zeros(layout.device_pool_bytes, dtype=torch.uint8)
    tokens = layout.indexer_pages * layout.page_tokens
    for layer, view in enumerate(page_views(layout, pool)):
        for block in (0, 4):
            for position in (0, 63, 64, 191):
                slot = block * tokens + position
                view[slot // 64, 0, slot % 64] += layer + 1
    for layer, offset in enumerate(layout.indexer_offset):
        for block in (0, 4):
            for position in (0, 63, 64, 191):
                start = block * layout.block_stride_bytes + offset
                start += position // 64 * layout.indexer_stride_bytes + position % 64 * KEY_BYTES
                assert (pool[start : start + KEY_BYTES] == layer + 1).all()


def test_prefix_hits_come_in_whole_indexer_blocks() -> None:
    """vLLM hashes by page and looks up both groups; a hit ends where both have blocks."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    vllm_config, config, _ = planned()
    vllm_config.cache_config.enable_prefix_caching = True
    vllm_config.cache_config.prefix_match_unit = None
    scheduler_block, hash_block = resolve_kv_cache_block_sizes(config, vllm_config)
    assert (scheduler_block, hash_block) == (192, 64)

    source, indexer = (group.kv_cache_spec.first_spec for group in config.kv_cache_groups[:2])
    two_groups = KVCacheConfig(
        num_blocks=64,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["s"], source), KVCacheGroupSpec(["i"], indexer)],
    )
    manager = KVCacheManager(
        two_groups,
        max_model_len=4096,
        scheduler_block_size=scheduler_block,
        hash_block_size=hash_block,
        max_in_flight_tokens=8192,
        enable_caching=True,
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(hash_block, sha256)

    def request(name: str, prompt: list[int]) -> Request:
        params = SamplingParams(max_tokens=1)
        return Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=hasher,
        )

    first = request("first", list(range(1000)))
    assert manager.get_computed_blocks(first)[1] == 0
    assert manager.allocate_slots(first, 1000) is not None
    second = request("second", [*range(700), *range(5000, 5300)])
    blocks, hit, *_ = manager.get_computed_blocks(second)
    assert hit == 576  # 700 // 192 * 192
    assert [len(ids) for ids in blocks.get_block_ids()] == [9, 3]


@pytest.mark.parametrize("pattern", [PATTERNS["glm-5.2"], PATTERNS["glm-tiny"], "FSSSFSSS", "FF"])
def test_a_connector_that_saves_blocks_copies_every_key(pattern: str) -> None:
    """vLLM's OffloadingConnector, given views of the shares, copies each block's keys and nothing twice."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import _group_kv_bytes_per_block
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    vllm_config, config, layout = planned(pattern)
    vllm_config.model_config.get_total_num_kv_heads = lambda: 1
    vllm_config.parallel_config.cp_kv_cache_interleave_size = 1
    scheduler = generate_scheduler_kv_cache_config([config])
    per_block = _group_kv_bytes_per_block(config.kv_cache_groups[1])
    assert per_block == _group_kv_bytes_per_block(scheduler.kv_cache_groups[1])
    assert per_block <= layout.block_stride_bytes

    pool = torch.zeros(layout.device_pool_bytes, dtype=torch.uint8)
    registered: list[Any] = []
    worker = OffloadingConnectorWorker.__new__(OffloadingConnectorWorker)
    worker.vllm_config, worker.kv_cache_config, worker.worker = vllm_config, config, None
    worker.spec = SimpleNamespace(get_worker=registered.append)
    views = share_views(layout, pool)
    worker.register_kv_caches(dict(zip(layout.indexer_layers, views, strict=True)))

    (caches,) = registered
    for tensor in caches.tensors:
        assert tensor.tensor.shape[1] == tensor.page_size_bytes
        tensor.tensor.fill_(1)
    keys = [view.sum().item() for view in page_views(layout, pool)]
    pages = layout.num_device_blocks * layout.indexer_pages
    assert keys == [pages * layout.page_tokens * KEY_BYTES] * len(layout.indexer_layers)
    assert sum(t.page_size_bytes for t in caches.tensors) == per_block
    assert pool.sum().item() == per_block * layout.num_device_blocks, "shares overlap"


def test_the_specs_stay_full_attention_for_vllm() -> None:
    """Managers, hit lookup and metadata treat the indexer group as they treat vLLM's own."""
    _, config, _ = planned()
    assert all(
        isinstance(spec, MLAAttentionSpec)
        for spec in config.kv_cache_groups[1].kv_cache_spec.kv_cache_specs.values()
    )
