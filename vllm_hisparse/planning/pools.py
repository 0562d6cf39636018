"""Sizes of the device pool and of the host pool, and the KVCacheConfig that describes them to vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.planning.bounds import RequestBlocks, request_blocks, state_bytes_per_region, table_bytes
from vllm_hisparse.planning.layout import LayerPlan, Layout, layout_from
from vllm_hisparse.planning.specs import ResidentSpec, resident_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NUM_RESERVED_HOST_BLOCKS = 2  # the pool's null block, and one block for a copy in flight


def kv_cache_config(
    vllm_config: VllmConfig, kv_cache_groups: list[KVCacheGroupSpec], available_memory: int, host_budget: int
) -> KVCacheConfig:
    """One device pool for indexer, resident and hot blocks, one host pool for the full KV.

    `available_memory`: device bytes; what the resolver needs beside the pool is set aside from it. vLLM plans again with
    the groups of a finished config and exactly the bytes of a smaller pool: then nothing is set aside again.
    `host_budget`: bytes of the host pool. Raises ValueError if a pool is too small for one request.
    """
    (plan,) = {group.kv_cache_spec.plan for group in kv_cache_groups if isinstance(group.kv_cache_spec, ResidentSpec)}
    _check_kv_layout(vllm_config)
    need = request_blocks(vllm_config, plan)
    num_blocks = _num_device_blocks(vllm_config, kv_cache_groups, plan, need, available_memory)
    num_host_blocks = _num_host_blocks(plan, need, host_budget)
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[_reserved(group) for group in kv_cache_groups],
        hisparse_host_num_blocks=num_host_blocks,
        hisparse_host_block_stride=len(plan.layers) * plan.page_bytes,
        hisparse_shared_host_pool=False,
        prefix_cache_retention_interval=vllm_config.cache_config.prefix_cache_retention_interval,
    )
    layout = layout_from(vllm_config, config)
    config.kv_cache_tensors = [*_host_tensors(layout), _indexer_tensor(layout), *_resident_tensors(layout)]
    return config


def device_overhead_bytes(
    config: HiSparseConfig, plan: LayerPlan, need: RequestBlocks, num_regions: int, max_requests: int
) -> int:
    """Device memory beside the pool: resolver state of every region, block tables, prefill staging, the pool's slack."""
    state = num_regions * state_bytes_per_region(config, plan, need)
    return state + table_bytes(plan, need, max_requests) + config.prefill_staging_bytes + plan.page_bytes


def _num_device_blocks(
    vllm_config: VllmConfig,
    groups: list[KVCacheGroupSpec],
    plan: LayerPlan,
    need: RequestBlocks,
    available_memory: int,
) -> int:
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        return int(override)
    stride = plan.block_stride_bytes
    if any(isinstance(g.kv_cache_spec, ResidentSpec) and g.kv_cache_spec.memory_reserved for g in groups):
        return available_memory // stride
    config = HiSparseConfig.from_vllm_config(vllm_config)
    max_requests = int(vllm_config.scheduler_config.max_num_seqs)
    regions = need.num_regions(available_memory // stride, max_requests)
    overhead = device_overhead_bytes(config, plan, need, regions, max_requests)
    num_blocks = max(0, available_memory - overhead) // stride
    if num_blocks <= need.admission_blocks:
        raise ValueError(
            f"got {available_memory} bytes of device memory for KV, {num_blocks} blocks of {stride} bytes after "
            f"{overhead} bytes for the resolver; need {need.admission_blocks + 1} blocks because one request of "
            "max_model_len has to be admitted: raise gpu_memory_utilization, or lower max_model_len, "
            "max_num_batched_tokens, max_num_seqs or max_hot_rows"
        )
    return num_blocks


def _num_host_blocks(plan: LayerPlan, need: RequestBlocks, host_budget: int) -> int:
    """Host blocks in the budget; independent of num_gpu_blocks_override."""
    block_bytes = len(plan.layers) * plan.page_bytes
    num_blocks = host_budget // block_bytes
    needed = need.num_pages + NUM_RESERVED_HOST_BLOCKS
    if num_blocks < needed:
        raise ValueError(
            f"got host_pool_gib={host_budget / 2**30:g}, {num_blocks} host blocks of {block_bytes} bytes; need {needed} "
            f"blocks ({needed * block_bytes / 2**30:.2f} GiB) because every page of a request of max_model_len must fit: "
            "raise host_pool_gib or lower max_model_len"
        )
    return num_blocks


def _check_kv_layout(vllm_config: VllmConfig) -> None:
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    if not layout.is_block_outermost:
        raise ValueError(
            f"got KV cache layout {layout.name}; need a block-outermost one such as BLHNC because indexer, resident and "
            "hot blocks share one pool: unset VLLM_KV_CACHE_LAYOUT"
        )


def _reserved(group: KVCacheGroupSpec) -> KVCacheGroupSpec:
    if not isinstance(group.kv_cache_spec, ResidentSpec):
        return group
    return replace(group, kv_cache_spec=replace(group.kv_cache_spec, memory_reserved=True))


def _host_tensors(layout: Layout) -> list[KVCacheTensor]:
    """One tensor an index group. A layer's rows are `host_row_stride` apart, which vLLM's description cannot say."""
    return [
        KVCacheTensor(
            size=layout.host_pool_bytes,
            layers=list(names),
            layer_stride=layout.row_bytes,
            block_stride=layout.page_tokens * row_bytes,
            offset=offset,
            host_resident=True,
        )
        for names, row_bytes, offset in zip(
            layout.index_groups, layout.group_row_bytes, layout.group_host_offset, strict=True
        )
    ]


def _indexer_tensor(layout: Layout) -> KVCacheTensor:
    """Layer l's page j of block b is at l * layer_stride + (b * indexer_pages + j) * indexer_stride_bytes."""
    return KVCacheTensor(
        size=layout.device_pool_bytes,
        layers=list(layout.indexer_layers),
        layer_stride=layout.geometry.shape.indexer_page_bytes,
        block_stride=layout.block_stride_bytes,
    )


def _resident_tensors(layout: Layout) -> list[KVCacheTensor]:
    return [
        KVCacheTensor(
            size=layout.device_pool_bytes,
            layers=[resident_name(name) for name in names],
            layer_stride=layout.page_bytes,
            block_stride=layout.block_stride_bytes,
        )
        for names in layout.parts
    ]
