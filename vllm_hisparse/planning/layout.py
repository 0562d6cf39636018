"""Where every byte of the device pool and of the host pool lies. Plain integers and tuples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_hisparse.config import user_error

from .geometry import Geometry, ceil_div


@dataclass(frozen=True)
class LayerPlan:
    """The model's layers placed in blocks; independent of the pools' sizes. Carried by the resident specs."""

    geometry: Geometry
    layers: tuple[str, ...]  # layers with KV rows, in model order
    index_groups: tuple[tuple[str, ...], ...]  # leader first; consecutive in `layers`
    indexer_layers: tuple[str, ...]  # layers with indexer keys

    @property
    def page_tokens(self) -> int:
        return self.geometry.shape.page_tokens

    @property
    def row_bytes(self) -> int:
        return self.geometry.shape.row_bytes

    @property
    def page_bytes(self) -> int:
        """One page of one layer."""
        return self.geometry.shape.page_bytes

    @property
    def block_stride_bytes(self) -> int:
        return self.geometry.block_stride_bytes

    @property
    def block_stride_rows(self) -> int:
        return self.geometry.block_stride_rows

    @property
    def num_parts(self) -> int:
        return self.geometry.num_parts

    @property
    def indexer_pages(self) -> int:
        """Pages of one indexer block."""
        return self.geometry.indexer_pages

    @property
    def indexer_stride_bytes(self) -> int:
        """Bytes between a layer's consecutive indexer pages; page j of block b is b * indexer_pages + j."""
        return self.geometry.indexer_stride_bytes

    @cached_property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """Layer names of each part; a page of a request is one device block of each part."""
        ends = [sum(self.geometry.part_layers[: part + 1]) for part in range(self.num_parts)]
        return tuple(
            self.layers[end - size : end] for end, size in zip(ends, self.geometry.part_layers, strict=True)
        )

    @cached_property
    def layer_part(self) -> tuple[int, ...]:
        """Part of each layer, aligned with `layers`."""
        return tuple(part for part, size in enumerate(self.geometry.part_layers) for _ in range(size))

    @cached_property
    def layer_offset(self) -> tuple[int, ...]:
        """Byte offset of each layer's page inside its block, aligned with `layers`."""
        return tuple(index * self.page_bytes for size in self.geometry.part_layers for index in range(size))

    @cached_property
    def layer_group(self) -> tuple[int, ...]:
        """Index group of each layer, aligned with `layers`."""
        return tuple(group for group, names in enumerate(self.index_groups) for _ in names)

    @cached_property
    def indexer_offset(self) -> tuple[int, ...]:
        """Byte offset of each indexer layer's first page inside a block, aligned with `indexer_layers`."""
        return tuple(
            index * self.geometry.shape.indexer_page_bytes for index in range(len(self.indexer_layers))
        )

    @property
    def indexer_share_bytes(self) -> int:
        """Bytes of an indexer block that each indexer layer stands for when a connector saves blocks."""
        return self.geometry.indexer_share_bytes

    @cached_property
    def indexer_share_offset(self) -> tuple[int, ...]:
        """Byte offset of each indexer layer's share inside a block, aligned with `indexer_layers`.

        Differs from `indexer_offset` in blocks of several pages: views for connectors start here.
        """
        return tuple(index * self.indexer_share_bytes for index in range(len(self.indexer_layers)))

    @cached_property
    def group_parts(self) -> tuple[tuple[int, ...], ...]:
        """Parts that each index group's layers lie in, ascending."""
        return tuple(
            tuple(sorted({self.layer_part[self.layer_index[name]] for name in names}))
            for names in self.index_groups
        )

    @cached_property
    def layer_index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.layers)}


@dataclass(frozen=True)
class Layout(LayerPlan):
    """A plan with the pools' sizes: all it takes to lay out memory, equal on scheduler and workers."""

    num_device_blocks: int
    num_host_blocks: int
    max_requests: int
    max_positions: int  # longest request in tokens
    num_regions: int  # hot regions that can exist at a time: rows of the resolver's state
    floor_hot_blocks: int  # blocks a part of the smallest region that can serve a step
    start_hot_blocks: int  # blocks a part of a region when it is granted
    max_hot_blocks: int  # blocks a part of a region at its cap
    tail_pages: int  # a decoding request's last pages, which steps in flight may write
    admission_pages: int  # blocks a part that admitting one request may claim

    @property
    def max_pages(self) -> int:
        """Pages of the longest request."""
        return ceil_div(self.max_positions, self.page_tokens)

    @property
    def max_hot_rows(self) -> int:
        """Slots of a region at its cap."""
        return self.max_hot_blocks * self.page_tokens

    @property
    def device_pool_bytes(self) -> int:
        return self.num_device_blocks * self.block_stride_bytes

    @property
    def device_slack_bytes(self) -> int:
        """Bytes to allocate behind the pool.

        A layer's view is whole pages from the layer's offset on; the last block's page may end between two of
        them, so a view that holds it reaches past the pool by less than a page.
        """
        return self.page_bytes

    @property
    def host_block_bytes(self) -> int:
        """One page of all layers."""
        return len(self.layers) * self.page_bytes

    @property
    def host_pool_bytes(self) -> int:
        return self.num_host_blocks * self.host_block_bytes

    @property
    def num_host_rows(self) -> int:
        return self.num_host_blocks * self.page_tokens

    @cached_property
    def group_row_bytes(self) -> tuple[int, ...]:
        """Bytes of one token's rows of all layers of an index group, side by side in the host pool."""
        return tuple(len(names) * self.row_bytes for names in self.index_groups)

    @cached_property
    def group_host_offset(self) -> tuple[int, ...]:
        """Start of each index group's region [num_host_rows, group_row_bytes] in the host pool."""
        return tuple(
            self.num_host_rows * sum(self.group_row_bytes[:group]) for group in range(len(self.index_groups))
        )

    @cached_property
    def host_offset(self) -> tuple[int, ...]:
        """Byte offset of each layer's first row in the host pool, aligned with `layers`."""
        return tuple(
            start + index * self.row_bytes
            for start, names in zip(self.group_host_offset, self.index_groups, strict=True)
            for index in range(len(names))
        )

    @cached_property
    def host_row_stride(self) -> tuple[int, ...]:
        """Bytes between consecutive tokens of a layer in the host pool, aligned with `layers`."""
        return tuple(self.group_row_bytes[group] for group in self.layer_group)


def index_groups(is_leader: Mapping[str, bool]) -> tuple[tuple[str, ...], ...]:
    """Splits layers, in order, into groups that share one selection; each starts with its leader."""
    groups: list[list[str]] = []
    for name, leads in is_leader.items():
        if leads:
            groups.append([])
        elif not groups:
            raise user_error(
                got=f"{name} as the first sparse layer, without an indexer",
                need="an indexer there",
                because="a layer without one reads the selection of the layer before it",
            )
        groups[-1].append(name)
    return tuple(tuple(names) for names in groups)


def layout_from(vllm_config: Any, kv_cache_config: Any) -> Layout:
    """The layout of `kv_cache_config`, whether the scheduler's or a worker's; both give the same."""
    from .bounds import request_blocks
    from .specs import ResidentSpec

    plan = next(
        group.kv_cache_spec.plan
        for group in kv_cache_config.kv_cache_groups
        if isinstance(group.kv_cache_spec, ResidentSpec)
    )
    need = request_blocks(vllm_config, plan)
    num_device_blocks = int(kv_cache_config.num_blocks)
    max_requests = int(vllm_config.scheduler_config.max_num_seqs)
    return Layout(
        geometry=plan.geometry,
        layers=plan.layers,
        index_groups=plan.index_groups,
        indexer_layers=plan.indexer_layers,
        num_device_blocks=num_device_blocks,
        num_host_blocks=int(kv_cache_config.hisparse_host_num_blocks),
        max_requests=max_requests,
        max_positions=int(vllm_config.model_config.max_model_len),
        num_regions=need.num_regions(num_device_blocks, plan.block_stride_bytes, max_requests),
        floor_hot_blocks=need.floor_hot_blocks,
        start_hot_blocks=need.start_hot_blocks,
        max_hot_blocks=need.max_hot_blocks,
        tail_pages=need.tail_pages,
        admission_pages=need.admission_pages,
    )
