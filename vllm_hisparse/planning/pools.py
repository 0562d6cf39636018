"""Sizes of the device pool and of the host pool, and the KVCacheConfig that describes them to vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from vllm_hisparse.config import HiSparseConfig, user_error

from .bounds import request_blocks
from .layout import LayerPlan, Layout, layout_from
from .sizes import checked_host_blocks, device_blocks, device_overhead_bytes
from .specs import ResidentSpec, resident_name

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

__all__ = ["device_overhead_bytes", "host_pool_bytes", "kv_cache_config"]


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
    num_host_blocks = checked_host_blocks(plan, request_blocks(vllm_config, plan), host_budget)
    config = KVCacheConfig(
        num_blocks=_num_device_blocks(vllm_config, kv_cache_groups, plan, available_memory),
        kv_cache_tensors=[],
        kv_cache_groups=[_reserved(group) for group in kv_cache_groups],
        hisparse_host_num_blocks=num_host_blocks,
        hisparse_host_block_stride=len(plan.layers) * plan.page_bytes,
        hisparse_shared_host_pool=_is_shared(vllm_config.parallel_config),
        prefix_cache_retention_interval=vllm_config.cache_config.prefix_cache_retention_interval,
    )
    layout = layout_from(vllm_config, config)
    config.kv_cache_tensors = [*_host_tensors(layout), _indexer_tensor(layout), *_resident_tensors(layout)]
    return config


def host_pool_bytes(vllm_config: VllmConfig) -> int:
    """Size of the host pool. Takes the place of vLLM's, which does not look into a nested MultiConnector."""
    return HiSparseConfig.from_vllm_config(vllm_config).host_pool_bytes


def _is_shared(parallel: ParallelConfig) -> bool:
    """Whether one host pool serves all ranks of the replica: they are on one node, which vLLM knows only of
    processes that it starts itself.

    Ranks that are on several nodes share one a node; other connectors are not told.
    """
    has_peers = parallel.tensor_parallel_size > 1
    return has_peers and parallel.distributed_executor_backend == "mp" and parallel.nnodes_within_dp == 1


def _num_device_blocks(
    vllm_config: VllmConfig, groups: list[KVCacheGroupSpec], plan: LayerPlan, available_memory: int
) -> int:
    """Blocks in the memory, less what is set aside.

    Nothing is set aside from a pool that could not admit one request afterwards. vLLM has refused those
    already, so it is the throwaway pool in which graphs are captured to measure them, of the size asked for.
    """
    num_blocks = available_memory // plan.block_stride_bytes
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        # 0.32 measures graphs with an override and no memory.
        return min(int(override), num_blocks) or int(override)
    if any(isinstance(g.kv_cache_spec, ResidentSpec) and g.kv_cache_spec.memory_reserved for g in groups):
        return num_blocks
    remaining = device_blocks(vllm_config, plan, available_memory)
    return remaining if remaining > request_blocks(vllm_config, plan).admission_blocks else num_blocks


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
