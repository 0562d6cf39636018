"""Joins the runtime to vLLM's worker: allocates the pools and binds the model's layers to them."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_hisparse import ops
from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.planning.layout import Layout, layout_from
from vllm_hisparse.planning.specs import ResidentSpec

from .host_sharing import replica
from .index_group import HiSparseIndexGroup
from .layer import LayerHandle
from .runtime import HiSparseRuntime

__all__ = ["current_runtime", "init_kv_cache"]

_current: HiSparseRuntime | None = None


def current_runtime() -> HiSparseRuntime:
    """The runtime of this worker process.

    The connector exists before it and picks it up when caches are registered.
    """
    assert _current is not None, "the connector was asked to work before the KV caches were bound"
    return _current


def init_kv_cache(
    kv_cache_config: KVCacheConfig,
    device: torch.device,
    kernel_block_sizes: list[int],
    vllm_config: VllmConfig,
    forward_context: dict[str, Any],
    block_tables: Any,
) -> dict[str, torch.Tensor]:
    """Allocate both pools and bind every layer. Returns vLLM's view of each real layer's cache, by layer
    name.

    Raises ValueError if the model's index groups are not the ones that were planned, or ranks that should
    share a host pool cannot.
    """
    global _current
    if device.type == "cuda":
        _check_backends(forward_context)
    ops.load_library("cuda" if device.type == "cuda" else "cpu")
    layout = layout_from(vllm_config, kv_cache_config)
    runtime = HiSparseRuntime(layout, HiSparseConfig.from_vllm_config(vllm_config), device, replica())
    _check_sharing(runtime, kv_cache_config)
    slot_mappings = {
        group.kv_cache_spec.part: block_tables.slot_mappings[i]
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
        if isinstance(group.kv_cache_spec, ResidentSpec)
    }
    for group in _index_groups(layout, forward_context):
        runtime.add_group(group)
    caches = {}
    for index, name in enumerate(layout.layers):
        handle: LayerHandle = forward_context[name].hisparse_cache
        part = layout.layer_part[index]
        handle.bind(
            part=part,
            pages=runtime.memory.resident_pages(index, handle.dtype),
            rows=runtime.memory.resident_rows(index, handle.dtype),
            slot_mapping=slot_mappings[part],
        )
        caches[name] = runtime.memory.host_pages(index, handle.dtype)
    caches.update((name, runtime.memory.indexer_pages(i)) for i, name in enumerate(layout.indexer_layers))
    _current = runtime
    return caches


def _check_backends(forward_context: dict[str, Any]) -> None:
    """Raises ValueError for an attention backend whose prefills cannot read context from the host."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

    for layer in forward_context.values():
        if getattr(layer, "hisparse_cache", None) is not None and not isinstance(
            layer.impl, FlashMLASparseImpl
        ):
            raise ValueError(
                f"got attention backend {type(layer.impl).__name__}; need --attention-backend "
                "FLASHMLA_SPARSE because prefills over context on the host are staged there"
            )


def _check_sharing(runtime: HiSparseRuntime, kv_cache_config: KVCacheConfig) -> None:
    """What other connectors were told of the pool: rank 0 alone writes what the replica reads."""
    num_ranks = runtime.memory.turns.num_ranks
    if kv_cache_config.hisparse_shared_host_pool and num_ranks < get_tp_group().world_size:
        raise ValueError(
            f"got {num_ranks} of {get_tp_group().world_size} tensor-parallel ranks that see each other's "
            "processes; need all in one container or PID namespace because they share one host pool"
        )


def _index_groups(layout: Layout, forward_context: dict[str, Any]) -> list[HiSparseIndexGroup]:
    groups: list[HiSparseIndexGroup] = []
    for names in layout.index_groups:
        handles = [forward_context[name].hisparse_cache for name in names]
        found = {id(h.group): h.group for h in handles}
        if len(found) != 1 or [h.index for h in handles] != list(range(len(names))):
            raise ValueError(
                f"got layers {list(names)} in index groups {[h.index for h in handles]}; need one "
                "group in layer order because its layers' rows were planned side by side"
            )
        groups.extend(found.values())
    return groups
