"""Sizes of the device pool and of the host pool, and the KVCacheConfig that describes them to vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from vllm_hisparse.config import GIB, HiSparseConfig, user_error

from .bounds import RequestBlocks, request_blocks, result_bytes, table_bytes
from .layout import LayerPlan, Layout, layout_from
from .specs import ResidentSpec, resident_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NUM_RESERVED_HOST_BLOCKS = 2  # the pool's null block, and one block for a copy in flight
MAX_HOST_ROWS = 1 << 31  # host rows are int32


def kv_cache_config(
    vllm_config: VllmConfig, kv_cache_groups: list[KVCacheGroupSpec], available_memory: int, host_budget: int
) -> KVCacheConfig:
    """One device pool for indexer, resident and hot blocks, one host pool for the full KV.

    `available_memory`: device bytes; what the resolver needs beside the pool is set aside from it. vLLM plans
    again with a finished config's groups and exactly the bytes of a smaller pool: nothing is set aside then.
    `host_budget`: bytes of the host pool. Raises ValueError if a pool is too small for one request.
    """
    plan = next(g.kv_cache_spec.plan for g in kv_cache_groups if isinstance(g.kv_cache_spec, ResidentSpec))
    _check_kv_layout(vllm_config)
    num_host_blocks = _num_host_blocks(plan, request_blocks(vllm_config, plan), host_budget)
    config = KVCacheConfig(
        num_blocks=_num_device_blocks(vllm_config, kv_cache_groups, plan, available_memory, num_host_blocks),
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
    vllm_config: VllmConfig, plan: LayerPlan, num_regions: int, num_host_blocks: int | None = None
) -> int:
    """Device memory beside the pool: region state, tables, a resolver's results, prefill staging, slack.

    Staging is never more than a page of each of `num_host_blocks`; those of a layout if it is one.
    """
    if num_host_blocks is None and isinstance(plan, Layout):
        num_host_blocks = plan.num_host_blocks
    need = request_blocks(vllm_config, plan)
    config = HiSparseConfig.from_vllm_config(vllm_config)
    scheduler = vllm_config.scheduler_config
    max_requests = int(scheduler.max_num_seqs)
    results = result_bytes(
        plan,
        config.top_k,
        int(scheduler.max_num_batched_tokens),
        max_requests,
        min(config.floor_hot_rows, need.max_hot_blocks * plan.page_tokens),
    )
    staging = config.prefill_staging_bytes
    if num_host_blocks is not None:
        staging = min(staging, num_host_blocks * plan.page_bytes)
    tables = table_bytes(need, num_regions, max_requests)
    return num_regions * need.state_bytes + tables + results + staging + plan.page_bytes


def host_pool_bytes(vllm_config: VllmConfig) -> int:
    """Size of the host pool. Takes the place of vLLM's, which does not look into a nested MultiConnector."""
    return HiSparseConfig.from_vllm_config(vllm_config).host_pool_bytes


def _num_device_blocks(
    vllm_config: VllmConfig,
    groups: list[KVCacheGroupSpec],
    plan: LayerPlan,
    available_memory: int,
    num_host_blocks: int,
) -> int:
    """Blocks in the memory, less what is set aside.

    Nothing is set aside from a pool that could not admit one request afterwards. vLLM has refused those
    already, so it is the throwaway pool in which graphs are captured to measure them, of the size asked for.
    """
    stride = plan.block_stride_bytes
    num_blocks = available_memory // stride
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        # 0.32 measures graphs with an override and no memory.
        return min(int(override), num_blocks) or int(override)
    if any(isinstance(g.kv_cache_spec, ResidentSpec) and g.kv_cache_spec.memory_reserved for g in groups):
        return num_blocks
    need = request_blocks(vllm_config, plan)
    regions = need.num_regions(num_blocks, stride, int(vllm_config.scheduler_config.max_num_seqs))
    # Enough: fewer blocks allow no more regions.
    overhead = device_overhead_bytes(vllm_config, plan, regions, num_host_blocks)
    remaining = max(0, available_memory - overhead) // stride
    return remaining if remaining > need.admission_blocks else num_blocks


def _num_host_blocks(plan: LayerPlan, need: RequestBlocks, host_budget: int) -> int:
    """Host blocks in the budget; independent of num_gpu_blocks_override."""
    block_bytes = len(plan.layers) * plan.page_bytes
    num_blocks = min(host_budget // block_bytes, (MAX_HOST_ROWS - 1) // plan.page_tokens)
    needed = need.num_pages + NUM_RESERVED_HOST_BLOCKS
    if num_blocks < needed:
        raise user_error(
            got=f"host_pool_gib={host_budget / GIB:g}: {num_blocks} host blocks of {block_bytes} bytes",
            need=f"{needed} blocks, {needed * block_bytes / GIB:.3f} GiB,",
            because="a request of max_model_len has all its pages there; lower max_model_len otherwise",
        )
    return num_blocks


def _check_kv_layout(vllm_config: VllmConfig) -> None:
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    if not layout.is_block_outermost:
        raise user_error(
            got=f"KV cache layout {layout.name}",
            need="a block-outermost one such as BLHNC",
            because="indexer, resident and hot blocks share one pool: unset VLLM_KV_CACHE_LAYOUT",
        )


def _reserved(group: KVCacheGroupSpec) -> KVCacheGroupSpec:
    if not isinstance(group.kv_cache_spec, ResidentSpec):
        return group
    return replace(group, kv_cache_spec=replace(group.kv_cache_spec, memory_reserved=True))


def _host_tensors(layout: Layout) -> list[KVCacheTensor]:
    """One tensor an index group. A layer's rows lie `host_row_stride` apart, which it cannot say."""
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
