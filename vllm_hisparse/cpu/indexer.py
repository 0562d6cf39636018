"""The sparse attention indexer on the CPU: fp8 keys, exact logits, one possible selection."""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

from .kernels.indexer import FP8, quantize

KEY_EPS = 1e-4  # lower bound of a key's absolute maximum, as in vLLM's cache insertion
SCALE_BYTES = 4


def register() -> None:
    """Puts `CpuSparseAttnIndexer` in the place of vLLM's. Idempotent."""
    from vllm.model_executor.custom_op import op_registry_oot

    if "SparseAttnIndexer" not in op_registry_oot:
        CustomOp.register_oot(CpuSparseAttnIndexer, name="SparseAttnIndexer")


class CpuSparseAttnIndexer(SparseAttnIndexer):
    """Selects `topk_tokens` positions for every query row.

    Row t of the shared selection gets the positions by falling logit, ties by rising position, then -1. It
    depends on the row's query and keys alone: not on the chunk, the batch or the block table around it.
    """

    def forward_native(
        self,
        hidden_states: torch.Tensor,  # [tokens, hidden], for its length only
        q_quant: torch.Tensor | tuple[torch.Tensor, torch.Tensor],  # fp8 [tokens, heads, head_dim]
        k: torch.Tensor | None,  # [tokens, head_dim], None if the keys are already in the cache
        weights: torch.Tensor,  # [tokens, heads], with the queries' scales folded in
    ) -> torch.Tensor:
        """Inserts the new keys and writes the selection. Returns it: int32 [max tokens, topk_tokens]."""
        assert isinstance(q_quant, torch.Tensor), "fp8 queries carry no separate scales"
        selection: torch.Tensor = self.topk_indices_buffer
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return selection  # profiling: no cache yet
        md = metadata[self.k_cache.prefix]
        cache = self.k_cache.kv_cache  # uint8 [blocks, block_size, head_dim + 4]
        if k is not None and not self.skip_k_cache_insert:
            insert_keys(cache, k[: md.slot_mapping.shape[0]], md.slot_mapping, self.scale_fmt == "ue8m0")
        selection[: hidden_states.shape[0]] = -1
        for first, num_keys, block_ids in _requests(md):
            rows = slice(first, first + num_keys.shape[0])
            keys, scales = read_keys(cache, block_ids, int(num_keys.max()))
            logits = score(q_quant[rows], weights[rows], keys, scales)
            selection[rows] = select(logits, num_keys, selection.shape[1])
        return selection

    forward_cpu = forward_oot = forward_native


def _requests(md: Any) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """(first row, keys that each of its rows sees [rows], block ids) of every request of the batch."""
    found = []
    if md.num_prefills:
        for chunk in md.prefill.chunks:
            num_keys = chunk.cu_seqlen_ke - chunk.cu_seqlen_ks
            starts, counts = torch.unique_consecutive(chunk.cu_seqlen_ks, return_counts=True)
            requests = torch.searchsorted(chunk.cu_seq_lens, starts, right=True) - 1
            first = 0
            for request, count in zip(requests.tolist(), counts.tolist(), strict=True):
                rows = num_keys[first : first + count]
                found.append((chunk.token_start + first, rows, chunk.block_table[request]))
                first += count
    if md.num_decodes:
        lens = md.decode.seq_lens
        assert lens.shape == (md.num_decode_tokens, 1), "one row a decode: no speculation on the CPU platform"
        found += [(row, lens[row], md.decode.block_table[row]) for row in range(lens.shape[0])]
    return found


def insert_keys(cache: torch.Tensor, k: torch.Tensor, slots: torch.Tensor, power_of_two_scale: bool) -> None:
    """Writes quantised keys: `cache` uint8 [blocks, block_size, dim + 4], `k` [n, dim], `slots` [n]."""
    stored = slots >= 0
    values, scales = quantize(k[stored], KEY_EPS, power_of_two_scale)
    row = torch.cat([values.view(torch.uint8), scales.unsqueeze(-1).view(torch.uint8)], -1)
    slots = slots[stored].long()
    cache[slots // cache.shape[1], slots % cache.shape[1]] = row


def read_keys(
    cache: torch.Tensor, block_ids: torch.Tensor, num_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A request's first `num_keys` keys: unscaled values fp64 [num_keys, dim], scales fp64 [num_keys]."""
    num_blocks = -(-num_keys // cache.shape[1])
    rows = cache[block_ids[:num_blocks].long()].reshape(-1, cache.shape[-1])[:num_keys]
    values = rows[:, :-SCALE_BYTES].contiguous().view(FP8).double()
    scales = rows[:, -SCALE_BYTES:].contiguous().view(torch.float32).double()
    return values, scales.squeeze(-1)


def score(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Index logits, fp32 [rows, keys]: sum over heads of weight * relu(q . k).

    A product of two e4m3 values is a multiple of 2**-18 below 2**18, so fp64 dot products of fewer than 2**17
    of them are exact in any order: the shape of the matrix product cannot change a bit. The heads are added
    one by one.

    Args:
        q: fp8 [rows, heads, dim].
        weights: [rows, heads].
        keys, scales: fp64 [keys, dim] and [keys].
    """
    rows, heads, dim = q.shape
    dots = (q.double().reshape(rows * heads, dim) @ keys.T).reshape(rows, heads, -1)
    weights = weights.double()
    logits = torch.zeros(rows, keys.shape[0], dtype=torch.float64)
    for head in range(heads):
        logits += torch.relu(dots[:, head] * scales) * weights[:, head : head + 1]
    return logits.float()


def select(logits: torch.Tensor, num_keys: torch.Tensor, topk: int) -> torch.Tensor:
    """Best positions of every row by falling logit, ties by rising position: int32 [rows, topk], padded with
    -1.

    Args:
        logits: fp32 [rows, keys].
        num_keys: [rows], how many leading keys each row may see.
    """
    seen = torch.arange(logits.shape[1]) < num_keys.unsqueeze(-1)
    order = logits.masked_fill(~seen, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    result = torch.full((logits.shape[0], topk), -1, dtype=torch.int32)
    result[:, : order.shape[1]] = order.int()
    result[torch.arange(topk) >= num_keys.unsqueeze(-1)] = -1
    return result
