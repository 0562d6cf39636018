"""Prefill on CUDA: vLLM's sparse backends read a prefill's whole context as a workspace or a paged cache of
its own.

A request whose pages are all on the device is read in place. The others' pages are brought together in the
staging area, as many at a time as it takes, from whichever tier each of them is on.
"""

from typing import TYPE_CHECKING

import torch
from vllm import _custom_ops as vllm_ops

if TYPE_CHECKING:
    from .runtime import HiSparseRuntime

__all__ = ["PrefillGather", "staging_plan"]


class StagingPlan:
    """What vLLM's metadata carries for prefills over host-backed context. Ours is made when it is used."""

    def __init__(self, block_table: torch.Tensor) -> None:
        self.block_table = block_table


def staging_plan(
    block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int, staging_block_capacity: int
) -> StagingPlan:
    """Replaces vLLM's plan over the source group's block table, which we do not fill."""
    return StagingPlan(block_table)


class PrefillGather:
    """Brings prefill contexts together, layer by layer, on the current stream."""

    def __init__(self, runtime: "HiSparseRuntime") -> None:
        self._runtime = runtime
        self._identity = torch.arange(runtime.staging.num_pages, dtype=torch.int32, device=runtime.device)
        self._zero = torch.zeros(1, dtype=torch.int32, device=runtime.device)
        self._ready = torch.Event(runtime.device)

    def upconvert_fp8(
        self,
        layer: int,
        pages: torch.Tensor,
        dst: torch.Tensor,
        starts: torch.Tensor,
        first_row: int,
        num_requests: int,
    ) -> torch.Event:
        """Contexts of batch rows [first_row, first_row + num_requests) as bf16 rows, one after the other.

        `pages`: the layer's resident pages [blocks, page_tokens, 656]. `dst`: bf16 [tokens of all of them,
        576]. `starts`: int32 [num_requests], each context's first row. Returns an event on the current
        stream.
        """
        runtime = self._runtime
        slots = runtime.batch[first_row : first_row + num_requests]
        if not any(runtime.num_host_only(slot) for slot in slots):
            table = self._resident_table(layer, first_row, num_requests)
            vllm_ops.cp_gather_and_upconvert_fp8_kv_cache(pages, dst, table, starts, num_requests)
        else:
            self._upconvert_staged(layer, dst, first_row, slots)
        self._ready.record(torch.accelerator.current_stream(runtime.device))
        return self._ready

    def _upconvert_staged(self, layer: int, dst: torch.Tensor, first_row: int, slots: list[int]) -> None:
        tokens, staging = self._runtime.layout.page_tokens, self._runtime.staging
        pages = staging.area.view(staging.num_pages, tokens, -1)
        start = 0
        for row, slot in enumerate(slots, first_row):
            length = self._runtime.context_length(row)
            context = dst[start : start + length]
            num_pages = -(-length // tokens)
            for first in range(0, num_pages, staging.num_pages):
                end = min(first + staging.num_pages, num_pages)
                staging.gather_context(layer, slot, first, end, staging.area)
                target = context[first * tokens : end * tokens]
                table = self._identity[None, : end - first]
                vllm_ops.cp_gather_and_upconvert_fp8_kv_cache(pages, target, table, self._zero, 1)
            start += length
        assert start == dst.shape[0], "the workspace is not what the batch's contexts need"

    def paged(
        self, layer: int, first_row: int, num_requests: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Contexts as a paged cache [pages, page_tokens, width] and its int32 block table [num_requests,
        pages].
        """
        layout = self._runtime.layout
        slots = self._runtime.batch[first_row : first_row + num_requests]
        rows = range(first_row, first_row + num_requests)
        counts = [-(-self._runtime.context_length(row) // layout.page_tokens) for row in rows]
        shape = (sum(counts) * layout.page_tokens, layout.row_bytes)
        cache = torch.empty(shape, dtype=torch.uint8, device=self._runtime.device)
        table = torch.zeros((num_requests, max(counts)), dtype=torch.int32, device=cache.device)
        begin = 0
        for request, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            area = cache[begin * layout.page_tokens : (begin + count) * layout.page_tokens]
            self._runtime.staging.gather_context(layer, slot, 0, count, area)
            torch.arange(begin, begin + count, dtype=torch.int32, out=table[request, :count])
            begin += count
        return cache.view(dtype).view(begin, layout.page_tokens, -1), table

    def _resident_table(self, layer: int, first_row: int, num_requests: int) -> torch.Tensor:
        """Resident blocks int32 [num_requests, pages]. Rows that nobody owns (warm-up) read block 0."""
        tables = self._runtime.tables
        owners = tables.row_request[first_row : first_row + num_requests].clamp_min(0)
        resident = tables.resident[self._runtime.layout.layer_part[layer]]
        return resident.index_select(0, owners).clamp_min_(0)
