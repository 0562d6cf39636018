"""Layers that share one selection, behind the interface that vLLM's sparse attention calls."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.mla import index_group as upstream

from .layer import LayerHandle

if TYPE_CHECKING:
    from .prefill import Piece, PrefillGather
    from .resolver import GroupResolver

__all__ = ["HiSparseIndexGroup"]

FP8_DS_MLA = "fp8_ds_mla"


@dataclass
class HiSparseIndexGroup(upstream.HiSparseMLAIndexGroup):
    """Resolves the leader's selection once; every layer of the group reads the result.

    A subclass because vLLM tells sparse layers with HiSparse by this type; nothing of the base class runs.
    Its `caches` holds our handles.
    """

    def __post_init__(self) -> None:
        self.resolver: GroupResolver | None = None

    @property
    def handles(self) -> list[LayerHandle]:
        """The layers' handles, leader first."""
        return self.caches

    def register_layer(
        self,
        vllm_config: VllmConfig | None = None,
        *,
        head_size: int | None = None,
        kv_cache_dtype: str | None = None,
    ) -> int:
        """Add the next layer; returns its index in the group."""
        from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

        assert vllm_config is not None and kv_cache_dtype is not None
        index = self.num_layers
        self.num_layers += 1
        packed = kv_cache_dtype == FP8_DS_MLA
        dtype = (
            torch.uint8 if packed else kv_cache_dtype_str_to_dtype(kv_cache_dtype, vllm_config.model_config)
        )
        self.caches.append(LayerHandle(self, index, dtype, vllm_config.scheduler_config.max_num_seqs))
        return index

    def cache(self, layer_index: int) -> LayerHandle:
        """The layer's handle."""
        return self.handles[layer_index]

    def physical_kv_cache(self, layer_index: int) -> torch.Tensor:
        """Contiguous [n, page_tokens, width] that the physical rows index, flattened over its first two
        dimensions.
        """
        rows = self.handles[layer_index].runtime.hot.attention_cache
        assert rows is not None, "attention before the KV caches were bound"
        return rows

    def prepare_for_batch(self, layer_index: int, attn_metadata: Any | None) -> None:
        """Before each forward; only the leader acts."""
        if layer_index == 0:
            self.handles[0].prepare_group_for_batch(attn_metadata)

    def convert_logical_to_physical_topk(
        self,
        layer_index: int,
        logical_topk_indices: torch.Tensor,
        attn_metadata: Any,
        *,
        block_stride_rows: int | None,
        return_valid_counts: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Physical rows int32 [T, K] aligned with the selection, -1 for padding; optionally int32 [T] counts.

        The leader's call resolves and fetches for the whole group; followers get the result for their part,
        and without prefetch fetch their own rows.
        """
        assert self.resolver is not None, "attention before the KV caches were bound"
        if layer_index == 0:
            query_start = attn_metadata.query_start_loc
            if (
                logical_topk_indices.shape[0] < attn_metadata.num_actual_tokens
            ):  # the decodes of a mixed batch
                query_start = query_start[: attn_metadata.num_decodes + 1]
            self.resolver.resolve(logical_topk_indices, query_start)
        else:
            self.resolver.fetch_layer(layer_index)
        rows, counts = self.resolver.result(self.handles[layer_index].part, logical_topk_indices.shape[0])
        return (rows, counts) if return_valid_counts else rows

    def gather_fp8_prefill(
        self,
        layer_index: int,
        source_cache: torch.Tensor,
        dst: torch.Tensor,
        block_table: torch.Tensor,
        workspace_starts: torch.Tensor,
        batch_size: int,
        attn_metadata: Any,
        request_start: int,
    ) -> torch.Event:
        """Contexts of `batch_size` prefills from `request_start` on, upconverted into `dst` bf16 [tokens,
        576].
        """
        handle = self.handles[layer_index]
        assert handle.pages is not None
        first_row = attn_metadata.num_decodes + request_start
        return self._prefill.upconvert_fp8(
            self._layer(layer_index), handle.pages, dst, workspace_starts, first_row, batch_size
        )

    def prefill_pieces(self, layer_index: int, topk: torch.Tensor, attn_metadata: Any) -> "Iterator[Piece]":
        """The batch's prefills, whose selections are int32 [T, K]: query rows over one paged cache each."""
        pages = self.handles[layer_index].pages
        assert pages is not None
        return self._prefill.pieces(self._layer(layer_index), pages, topk, attn_metadata.num_decodes)

    @property
    def _prefill(self) -> "PrefillGather":
        assert self.resolver is not None
        assert self.resolver.runtime.prefill is not None
        return self.resolver.runtime.prefill

    def _layer(self, layer_index: int) -> int:
        assert self.resolver is not None
        return self.resolver.layers[layer_index]

    def prefill_chunks(
        self, layer_index: int, topk: torch.Tensor, attn_metadata: Any
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Rows of prefills whose context is partly on the host, staged a few query rows at a time.

        Yields (first row, end row, staged rows int32 [end - first, K] or -1, staging [m, width]); the staging
        area is overwritten when the iterator advances.
        """
        assert self.resolver is not None
        return self.resolver.staged_chunks(
            layer_index, topk, attn_metadata.query_start_loc, self.handles[layer_index].dtype
        )
