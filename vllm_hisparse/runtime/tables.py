"""The tables that the resolver reads, and the resolver's own state, as tensors on the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from vllm_hisparse import ops
from vllm_hisparse.messages import PageWrite
from vllm_hisparse.planning.layout import Layout

from .transfer import to_device

__all__ = ["BatchRow", "PageTables", "SelectionState"]

ALIGNMENT = 4  # words: tables start where 16 bytes can be read at once
EVERY_POSITION = torch.iinfo(torch.int32).max


BatchRow = tuple[int, int, int]  # request slot, hot region (-1: none), its usable slots
NOBODY: BatchRow = (-1, -1, 0)


class PageTables:
    """Where every request's pages are. Shared by all index groups of an engine; written between forwards
    only.

    All int32, on the device, at fixed addresses:

    - `batch` [requests, 4]: of each batch row of the step the request slot, the hot region and its usable
      slots, the last word unused; -1, -1, 0 for padding
    - `resident` [parts, requests, pages]: device block, -1 where the page cannot be read on the device
    - `host` [requests, pages]: host block, -1 where there is none (kept only for pages that are not resident)
    - `hot` [parts, regions, blocks]: device blocks of each hot region, in slot order

    They lie in one piece of memory, so that a change of several is one launch.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        requests, pages, parts = layout.max_requests, layout.max_pages, layout.num_parts
        shapes = [
            (requests, 4),
            (parts, requests, pages),
            (requests, pages),
            (parts, layout.num_regions, layout.max_hot_blocks),
        ]
        sizes = [math.prod(shape) for shape in shapes]
        starts = [*accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)]
        self._words = torch.full((starts[-1],), -1, dtype=torch.int32, device=device)
        self.batch, self.resident, self.host, self.hot = (
            self._words[start : start + size].view(shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=False)
        )
        _, self._resident_start, self._host_start, self._hot_start = starts[:4]
        self._rows = [NOBODY] * requests  # of `batch`
        self.batch[:, 2:].zero_()

    def clear(self, slots: list[int]) -> None:
        """Empty the rows of request slots that are about to be bound."""
        for slot in slots:
            self.resident[:, slot].fill_(-1)
            self.host[slot].fill_(-1)

    def write_pages(self, writes: tuple[PageWrite, ...]) -> None:
        """Apply page deltas; the last one of a page wins."""
        num_parts, num_requests, max_pages = self.resident.shape
        stride = num_requests * max_pages
        words: dict[int, int] = {}
        for slot, page, device_blocks, host_block in writes:
            at = slot * max_pages + page
            words[self._host_start + at] = host_block
            for part in range(num_parts):
                words[self._resident_start + part * stride + at] = device_blocks[part]
        self._write(words)

    def write_region(self, region: int, device_blocks: Sequence[Sequence[int]]) -> None:
        """A region's device blocks, [part][block] in slot order."""
        _, num_regions, max_blocks = self.hot.shape
        words: dict[int, int] = {}
        for part, blocks in enumerate(device_blocks):
            start = self._hot_start + (part * num_regions + region) * max_blocks
            words.update(zip(range(start, start + len(blocks)), blocks, strict=True))
        self._write(words)

    def set_batch(self, rows: Sequence[BatchRow]) -> None:
        """This step's batch rows; all others are padding. Sends those that are not there yet."""
        words: dict[int, int] = {}
        for i, row in enumerate([*rows, *[NOBODY] * (len(self._rows) - len(rows))]):
            if row != self._rows[i]:
                self._rows[i] = row
                words.update(zip(range(4 * i, 4 * i + 3), row, strict=True))
        if words:
            self._write(words)

    def _write(self, words: dict[int, int]) -> None:
        ops.write_words(self._words, list(words), list(words.values()))


@dataclass(frozen=True)
class SelectionState:
    """What one index group remembers from step to step, by region. Owned and written by the resolver."""

    slot_of: torch.Tensor  # int16 [regions, positions]: slot of a position, negative for none
    position_of: torch.Tensor  # int32 [regions, slots]: position in a slot, -1 if empty
    key: torch.Tensor  # int32 [regions, slots]: eviction key
    clock: torch.Tensor  # int32 [regions]: steps seen

    @classmethod
    def allocate(cls, layout: Layout, device: torch.device) -> "SelectionState":
        """Empty state for every region of the layout."""
        regions, slots, positions = (
            layout.num_regions,
            layout.max_hot_rows,
            layout.max_pages * layout.page_tokens,
        )
        return cls(
            slot_of=torch.full((regions, positions), -1, dtype=torch.int16, device=device),
            position_of=torch.full((regions, slots), -1, dtype=torch.int32, device=device),
            key=torch.full((regions, slots), ops.EMPTY_KEY, dtype=torch.int32, device=device),
            clock=torch.zeros(regions, dtype=torch.int32, device=device),
        )

    def keep(self, num_slots: dict[int, int]) -> None:
        """Forget what regions hold beyond the slots they keep; `num_slots` 0 for one with a new owner."""
        ids, kept = to_device([list(num_slots), list(num_slots.values())], torch.int32, self.clock.device)
        ops.forget(
            self.slot_of,
            self.position_of,
            self.key,
            self.clock,
            ids,
            first_slot=kept,
            first_position=torch.full_like(ids, EVERY_POSITION),
        )
