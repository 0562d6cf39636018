"""What vLLM's attention layer sees of HiSparse: `layer.hisparse_cache`."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .index_group import HiSparseIndexGroup

__all__ = ["LayerHandle"]


class _HotView:
    """The physical cache as kernel warm-up reads it."""

    attention_cache: torch.Tensor | None = None  # [n, page_tokens, width], contiguous
    block_size: int = 0


class _LayerRuntime:
    """Attributes that vLLM reads through `hisparse_cache.runtime`."""

    def __init__(self, is_group_leader: bool, max_num_reqs: int) -> None:
        self.is_group_leader = is_group_leader
        self.max_num_reqs = max_num_reqs
        self.hot = _HotView()


class LayerHandle:
    """One layer's KV: where its new rows are written and where its selected rows are read.

    Made with the model, before any memory exists; `bind` gives it its views.
    """

    def __init__(
        self, group: "HiSparseIndexGroup", index: int, dtype: torch.dtype, max_num_reqs: int
    ) -> None:
        self.group = group
        self.index = index  # in the index group; 0 leads
        self.dtype = dtype
        self.runtime = _LayerRuntime(index == 0, max_num_reqs)
        self.dummy_batch = True  # no metadata: nothing is written
        self.part = 0
        self.pages: torch.Tensor | None = None  # [device blocks, page_tokens, width], strided
        self.slot_mapping: torch.Tensor | None = None  # int64 [max tokens]: where the step's tokens go

    def bind(self, *, part: int, pages: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Connect the layer to the device pool. The tensors are views; their addresses stay."""
        self.part = part
        self.pages = pages
        self.slot_mapping = slot_mapping
        self.runtime.hot.attention_cache = rows
        self.runtime.hot.block_size = rows.shape[1]

    @property
    def all_context_pages_resident(self) -> bool:
        """Whether no request of the batch has a page that only the host has."""
        resolver = self.group.resolver
        return resolver is None or resolver.runtime.is_resident

    def write_target(self, num_rows: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(pages [blocks, page_tokens, width], slots int64 [n], n) for a step's new rows."""
        assert self.pages is not None and self.slot_mapping is not None
        n = min(num_rows, num_slots)
        return self.pages, self.slot_mapping[:n], n

    def prepare_group_for_batch(self, attn_metadata: Any | None) -> None:
        """Called by the leader before each forward's write; None marks a dummy run."""
        for handle in self.group.handles:
            handle.dummy_batch = attn_metadata is None

    def finish_kv_update(self) -> None:
        """Nothing to do: sealed pages leave between steps."""
