"""bf16 rows on CUDA: FlashMLA's sparse attention of a batch in which some contexts are partly on the host."""

from typing import Any

import torch
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl
from vllm.v1.attention.backends.mla.sparse_utils import (
    flat_kv_row_view,
    triton_convert_req_index_to_global_index,
)

from .index_group import HiSparseIndexGroup
from .prefill import Piece

__all__ = ["forward_bf16"]

_without_hisparse = FlashMLASparseImpl._forward_bf16_kv


def forward_bf16(
    self: Any,
    q: torch.Tensor,
    kv_c_and_k_pe_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    attn_metadata: Any,
    actual_num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replaces `FlashMLASparseImpl._forward_bf16_kv`, which brings all prefills of a batch together in memory
    that it
    allocates for them. Here only what has to be staged is, and never more than the staging area takes.

    `q` [T, heads, 576], `topk_indices` int32 [T, K]; returns [T, heads, 512]. A layer without HiSparse goes
    vLLM's way.
    """
    group, layer = self.index_group, self.index_group_index
    if not isinstance(group, HiSparseIndexGroup):
        return _without_hisparse(self, q, kv_c_and_k_pe_cache, topk_indices, attn_metadata, actual_num_heads)

    def resolved(num_rows: int) -> torch.Tensor:
        rows, counts = group.convert_logical_to_physical_topk(
            layer, topk_indices[:num_rows], attn_metadata, block_stride_rows=None, return_valid_counts=True
        )
        cache = group.physical_kv_cache(layer)
        out, _ = self._bf16_flash_mla_kernel(q[:num_rows], cache, rows, counts, actual_num_heads)
        return out

    num_decodes = attn_metadata.num_decode_tokens
    if num_decodes >= q.shape[0] or group.cache(layer).all_context_pages_resident:
        return resolved(q.shape[0]), None
    outputs = [resolved(num_decodes)] if num_decodes else []
    topk = topk_indices[num_decodes:]
    for piece in group.prefill_pieces(layer, topk, attn_metadata):
        cache, rows, counts = _rows_of(piece, topk, attn_metadata.block_size)
        chunk = q[num_decodes + piece.first : num_decodes + piece.end]
        outputs.append(self._bf16_flash_mla_kernel(chunk, cache, rows, counts, actual_num_heads)[0])
    return torch.cat(outputs), None


def _rows_of(
    piece: Piece, topk: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(cache [rows, width], rows int32 [n, K], counts int32 [n]) of a piece's query rows, as vLLM's own
    conversion
    orders them.
    """
    cache, stride = flat_kv_row_view(piece.pages, block_size)
    chosen = topk[piece.first : piece.end]
    rows, counts = triton_convert_req_index_to_global_index(
        torch.zeros(chosen.shape[0], dtype=torch.int32, device=chosen.device),
        piece.table,
        chosen,
        BLOCK_SIZE=block_size,
        BLOCK_STRIDE_ROWS=stride,
        NUM_TOPK_TOKENS=chosen.shape[1],
        return_valid_counts=True,
    )
    return cache, rows, counts
