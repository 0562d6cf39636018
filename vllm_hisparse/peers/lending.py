"""The producing side: an ended request's pages, as vLLM's NixlConnector offers them to another engine.

Leases, expiry, handshake and notifications are NixlConnector's. It sees other groups than the engine has:
indexer keys, one group a part of the resident pages, and host pages. A page is offered on one of the two
tiers, with `ABSENT` in the other's list. Device blocks are one region as a whole, since keys and parts share
them; host pages are one region an index group, whose layers' rows lie side by side. One more region has marks
of the requests whose pages are lent.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from vllm_hisparse.planning.layout import Layout
from vllm_hisparse.runtime.memory import Memory
from vllm_hisparse.scheduler.coordinator import HiSparseCoordinator
from vllm_hisparse.scheduler.residency import STATES, Host

from .addresses import ABSENT
from .marks import Marks, row_bytes
from .wire import MARKS_REGION, device_region, host_region

__all__ = ["HOST_GROUP", "lent_blocks", "lent_caches", "lent_kv_cache_config"]

HOST_GROUP = "hisparse_host_group"  # in kv_transfer_params: which block list is that of host pages


def lent_kv_cache_config(kv_cache_config: KVCacheConfig, layout: Layout) -> KVCacheConfig:
    """What NixlConnector is to know of the KV caches."""
    source, indexer = kv_cache_config.kv_cache_groups[:2]
    row = next(iter(iter_layer_specs(source.kv_cache_spec)))  # all layers' rows are equally long
    keys = next(iter(iter_layer_specs(indexer.kv_cache_spec)))
    token_bytes = {host_region(group): size for group, size in enumerate(layout.group_row_bytes)}
    token_bytes[MARKS_REGION] = row_bytes(layout.page_tokens) // layout.page_tokens
    host = {
        name: MLAAttentionSpec(
            block_size=layout.page_tokens, num_kv_heads=1, head_size=size, dtype=torch.uint8
        )
        for name, size in token_bytes.items()
    }
    groups = [
        KVCacheGroupSpec([device_region(layout), *indexer.layer_names], keys),
        *(KVCacheGroupSpec(list(names), row) for names in layout.parts),
        KVCacheGroupSpec(list(host), UniformTypeKVCacheSpecs.from_specs(host), host_resident=True),
    ]
    return replace(kv_cache_config, kv_cache_groups=groups, hisparse_shared_host_pool=False)


def lent_caches(memory: Memory, marks: Marks) -> dict[str, torch.Tensor]:
    """Views of both pools and of the marks, uint8 [blocks or rows, 1, 1 or page_tokens, bytes], by names of
    `lent_kv_cache_config`.
    """
    layout = memory.layout
    blocks, stride = layout.num_device_blocks, layout.block_stride_bytes
    views = {device_region(layout): memory.device_pool[: blocks * stride].view(blocks, 1, 1, stride)}
    for group in range(len(layout.index_groups)):
        rows = memory.group_host_rows(group)
        views[host_region(group)] = rows.view(layout.num_host_blocks, 1, layout.page_tokens, -1)
    table = marks.table.view(torch.uint8)
    views[MARKS_REGION] = table.view(len(table), 1, layout.page_tokens, -1)
    return views


def lent_blocks(coordinator: HiSparseCoordinator, request_id: str, num_tokens: int) -> tuple[list[int], ...]:
    """Lend the request's pages, up to `num_tokens` tokens. Returns block ids by group: keys, parts, host."""
    record = coordinator.lend(request_id)
    num_pages = -(-num_tokens // coordinator.layout.page_tokens)
    (indexer,) = (m for m in coordinator.on_device if m not in coordinator.resident)
    keys = [block.block_id for block in indexer.req_to_blocks[request_id][:num_pages]]
    parts: list[list[int]] = [[] for _ in coordinator.resident]
    host: list[int] = []
    for page in range(num_pages):
        on_host = STATES[record.pages[page]][1] is Host.VALID
        device: Sequence[Any] = coordinator.leases.device_blocks(record, page)
        assert on_host or not any(block.is_null for block in device), (request_id, page, record.pages[page])
        for part, block in zip(parts, device, strict=True):
            part.append(ABSENT if on_host else block.block_id)
        host.append(coordinator.source.host_block(request_id, page).block_id if on_host else ABSENT)
    return keys, *parts, host
