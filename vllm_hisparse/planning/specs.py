"""KV cache specs of our own groups, as vLLM's planner and block tables see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from .layout import LayerPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RESIDENT_SUFFIX = ".hisparse_resident"
SOURCE_ROLE = "hisparse_plugin_source"  # vLLM's own "hisparse_source" selects its own manager


@dataclass(frozen=True, kw_only=True)
class ResidentSpec(KVCacheSpec):
    """Pages of one part in the device pool, laid out by the runtime.

    Hot regions are leased from the same pool with the same layout, outside any group. `block_size` is the
    tokens of a page, `block_stride_alignment` the pool's block stride, so that vLLM arrives at it.
    """

    plan: LayerPlan
    part: int
    memory_reserved: bool = False  # the pool was sized with the resolver's memory set aside (pools.py)

    @property
    def prefix_cacheable(self) -> bool:
        """False: pages are published by the host pool's group."""
        return False

    @property
    def has_layer_views(self) -> bool:
        """False: the runtime makes the views."""
        return False

    @property
    def page_size_bytes(self) -> int:
        """One page of one layer; vLLM adds up the part's layers."""
        return self.plan.page_bytes

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Of admitting one request, in one layer: fewer than its pages if it is longer than the pool."""
        from .bounds import request_blocks

        return request_blocks(vllm_config, self.plan).admission_pages * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class IndexerSpec(MLAAttentionSpec):
    """An indexer layer in blocks of several pages, which lie page by page: [pages][layers][page_tokens keys].

    A layer's keys are not contiguous in such a block, but a connector that saves indexer blocks copies
    `page_size_bytes` of each layer's view. So this is the layer's share of the block, see
    `Geometry.indexer_share_bytes`, and connectors get views that start at the shares.
    """

    share_bytes: int

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.share_bytes

    @property
    def page_size_bytes(self) -> int:
        return self.share_bytes


def resident_name(layer: str) -> str:
    """Pseudo layer that stands for `layer` in its part's resident group."""
    return layer + RESIDENT_SUFFIX


def source_name(pseudo_layer: str) -> str:
    """The layer that a resident pseudo layer stands for."""
    return pseudo_layer.removesuffix(RESIDENT_SUFFIX)
