"""Prefill on CUDA: vLLM's sparse backends read a prefill's whole context as a workspace or a paged cache of
its own.

A request whose pages are all on the device is read in place. The others' pages are brought together in the
staging area, as many at a time as it takes, from whichever tier each of them is on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm import _custom_ops as vllm_ops

if TYPE_CHECKING:
    from .runtime import HiSparseRuntime

__all__ = ["Piece", "PrefillGather", "staging_plan"]


class StagingPlan:
    """What vLLM's metadata carries for prefills over host-backed context. Ours is made when it is used."""

    def __init__(self, block_table: torch.Tensor) -> None:
        self.block_table = block_table


def staging_plan(
    block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int, staging_block_capacity: int
) -> StagingPlan:
    """Replaces vLLM's plan over the source group's block table, which we do not fill."""
    return StagingPlan(block_table)


@dataclass(frozen=True)
class Piece:
    """Query rows whose selections lie in one paged cache.

    The staging area's content lasts until the next piece.
    """

    first: int  # query row of the prefills
    end: int
    pages: torch.Tensor  # [blocks, page_tokens, width], strided
    table: torch.Tensor  # int32 [1, context pages]: block of each page that these rows select


class PrefillGather:
    """Brings prefill contexts together, layer by layer, on the current stream."""

    def __init__(self, runtime: "HiSparseRuntime") -> None:
        self._runtime = runtime
        self._identity = torch.arange(runtime.staging.num_pages, dtype=torch.int32, device=runtime.device)
        self._zero = torch.zeros(1, dtype=torch.int32, device=runtime.device)
        self._ready = torch.Event(runtime.device) if runtime.device.type == "cuda" else None

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
        assert self._ready is not None
        self._ready.record(torch.accelerator.current_stream(runtime.device))
        return self._ready

    def _upconvert_staged(self, layer: int, dst: torch.Tensor, first_row: int, slots: list[int]) -> None:
        tokens, staging = self._runtime.layout.page_tokens, self._runtime.staging
        pages = staging.area.view(staging.num_pages, tokens, -1)
        start = 0
        for row, slot in enumerate(slots, first_row):
            length = self._runtime.step.contexts[row]
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

    def pieces(self, layer: int, pages: torch.Tensor, topk: torch.Tensor, first_row: int) -> Iterator[Piece]:
        """The prefills of batch rows from `first_row` on, whose selections are int32 [T, K], piece by piece.

        `pages`: the layer's resident pages [blocks, page_tokens, width].
        """
        runtime = self._runtime
        begin = 0
        for row, slot in enumerate(runtime.batch[first_row:], first_row):
            end = begin + runtime.step.queries[row]
            if runtime.num_host_only(slot):
                yield from self._staged(
                    layer, slot, runtime.step.contexts[row], topk, begin, end, pages.dtype
                )
            else:
                yield Piece(begin, end, pages, self._resident_table(layer, row, 1))
            begin = end
        assert begin == topk.shape[0], "the selection is not of this step's prefills"

    def _staged(
        self,
        layer: int,
        slot: int,
        context: int,
        topk: torch.Tensor,
        begin: int,
        end: int,
        dtype: torch.dtype,
    ) -> Iterator[Piece]:
        """Rows [begin, end) of one request: all of its context at once if the staging area takes that, else
        as many rows
        at a time as select no more pages than the area has.
        """
        staging, tokens = self._runtime.staging, self._runtime.layout.page_tokens
        area = staging.area.view(dtype).view(staging.num_pages, tokens, -1)
        num_pages = -(-context // tokens)
        if num_pages <= staging.num_pages:
            staging.gather_context(layer, slot, 0, num_pages, staging.area)
            yield Piece(begin, end, area, self._identity[None, :num_pages])
            return
        while begin < end:
            stop, chosen = self._fitting(topk, begin, end)
            staging.gather_pages(layer, slot, chosen, staging.area)
            table = torch.full((1, num_pages), -1, dtype=torch.int32, device=topk.device)
            table[0, chosen] = self._identity[: chosen.numel()]
            yield Piece(begin, stop, area, table)
            begin = stop

    def _fitting(self, topk: torch.Tensor, begin: int, end: int) -> tuple[int, torch.Tensor]:
        """(end, int64 [n] pages) of rows from `begin` on that select no more pages than the area has.

        Asks the device for a number, once a try. A single row always fits: `Staging` sees to it.
        """
        while True:
            rows = topk[begin:end]
            pages = torch.unique(rows[rows >= 0]).div_(
                self._runtime.layout.page_tokens, rounding_mode="floor"
            )
            pages = torch.unique_consecutive(pages).long()
            if pages.numel() <= self._runtime.staging.num_pages:
                return end, pages
            end = begin + max(1, (end - begin) // 2)

    def _resident_table(self, layer: int, first_row: int, num_requests: int) -> torch.Tensor:
        """Resident blocks int32 [num_requests, pages]. Rows that nobody owns (warm-up) read block 0."""
        tables = self._runtime.tables
        owners = tables.batch[first_row : first_row + num_requests, 0].clamp_min(0)
        resident = tables.resident[self._runtime.layout.layer_part[layer]]
        return resident.index_select(0, owners).clamp_min_(0)
