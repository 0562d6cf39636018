"""Prefill over a context that is partly on the host, through a staging area of fixed size.

A prefill's query rows select more than a hot region holds. Their host-only pages are gathered a few query
rows at a time, as many as the area takes; only requests that have such pages stage anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_hisparse import ops
from vllm_hisparse.planning.sizes import staging_pages

from .counters import STAGED

if TYPE_CHECKING:
    from .runtime import HiSparseRuntime

__all__ = ["Chunk", "Staging"]


@dataclass(frozen=True)
class Chunk:
    """Query rows whose host-only pages fit the staging area together."""

    first: int  # query row of the batch
    end: int
    rows: torch.Tensor  # int32 [end - first, K] row of the staging area, -1 where the row is not staged
    host_blocks: torch.Tensor  # int32 [pages] in staging order


class Staging:
    """The staging area, uint8 [pages * page_tokens, row_bytes] on the device, shared by all layers one after
    the other.
    """

    def __init__(self, runtime: "HiSparseRuntime", device: torch.device) -> None:
        layout, config = runtime.layout, runtime.config
        self._runtime = runtime
        self.num_pages = staging_pages(config, layout.page_bytes, layout.max_pages)
        needed = min(config.top_k, layout.max_pages)
        if self.num_pages < needed:
            raise ValueError(
                f"got prefill_staging_mib={config.prefill_staging_mib}, room for {self.num_pages} pages of "
                f"{layout.page_bytes} bytes; need {needed} pages because one query row may select that many"
            )
        self.area = torch.zeros(
            (self.num_pages * layout.page_tokens, layout.row_bytes), dtype=torch.uint8, device=device
        )

    def plan(self, topk: torch.Tensor, query_start: torch.Tensor) -> Iterator[Chunk]:
        """Split a selection int32 [T, K] into chunks. Nothing for a batch without host-only prefills."""
        bounds = query_start.tolist()
        for batch_row, slot in enumerate(self._runtime.batch):
            first, end = bounds[batch_row], bounds[batch_row + 1]
            if end - first > self._runtime.config.verify_rows and self._runtime.num_host_only(slot):
                yield from self._plan_request(topk, first, end, slot)

    def _plan_request(self, topk: torch.Tensor, first: int, end: int, slot: int) -> Iterator[Chunk]:
        tokens = self._runtime.layout.page_tokens
        host = self._runtime.tables.host[slot]
        resident = self._runtime.tables.resident[0, slot]
        position = topk[first:end].long()
        page = position.clamp_min(0) // tokens
        staged = (position >= 0) & (resident[page] < 0)  # [rows, K]
        for begin, stop in self._split(page, staged):
            here, pages = staged[begin:stop], page[begin:stop]
            wanted, index = torch.unique(pages[here], return_inverse=True)
            if wanted.numel() == 0:
                continue
            rows = torch.full(here.shape, -1, dtype=torch.int32, device=topk.device)
            rows[here] = (index * tokens + position[begin:stop][here] % tokens).int()
            yield Chunk(first + begin, first + stop, rows, host[wanted])

    def _split(self, page: torch.Tensor, staged: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Runs of query rows whose staged pages fit the area."""
        begin, held = 0, set[int]()
        for row in range(page.shape[0]):
            wanted = set(page[row][staged[row]].tolist())
            if len(held | wanted) > self.num_pages:
                yield begin, row
                begin, held = row, set()
            held |= wanted
        yield begin, page.shape[0]

    def gather(self, layer: int, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """Copy the chunk's pages of one layer into the area; returns it as [rows, width] of `dtype`."""
        self.collect(layer, torch.full_like(chunk.host_blocks, -1), chunk.host_blocks, self.area)
        return self.area.view(dtype)

    def gather_context(self, layer: int, slot: int, first: int, end: int, area: torch.Tensor) -> None:
        """Copy pages [first, end) of a request into `area`, from whichever tier each of them is on."""
        tables = self._runtime.tables
        resident = tables.resident[self._runtime.layout.layer_part[layer], slot, first:end]
        self.collect(layer, resident, tables.host[slot, first:end], area)

    def gather_pages(self, layer: int, slot: int, pages: torch.Tensor, area: torch.Tensor) -> None:
        """Copy a request's pages int64 [n] into the first n of `area`, from whichever tier each of them is
        on.
        """
        tables = self._runtime.tables
        resident = tables.resident[self._runtime.layout.layer_part[layer], slot]
        self.collect(layer, resident[pages], tables.host[slot, pages], area)

    def collect(
        self, layer: int, device_blocks: torch.Tensor, host_blocks: torch.Tensor, area: torch.Tensor
    ) -> None:
        """Copy one layer's pages into `area`, uint8 [rows, row_bytes]: from int32 [n] device blocks, or where
        those
        are negative from int32 [n] host blocks.
        """
        layout, memory = self._runtime.layout, self._runtime.memory
        self._runtime.counters.rows[0, STAGED] += ((device_blocks < 0) & (host_blocks >= 0)).sum()
        ops.gather_pages(
            memory.device_pool,
            memory.host_pool,
            area,
            device_blocks,
            host_blocks,
            layer_offset=layout.layer_offset[layer],
            host_offset=layout.host_offset[layer],
            host_row_stride=layout.host_row_stride[layer],
            row_bytes=layout.row_bytes,
            block_size=layout.page_tokens,
            block_stride_bytes=layout.block_stride_bytes,
        )
