"""The tables that the resolver reads, and the resolver's own state, as tensors on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_hisparse import ops
from vllm_hisparse.messages import PageWrite, RegionWrite
from vllm_hisparse.planning.layout import Layout

from .transfer import to_device

__all__ = ["PageTables", "SelectionState"]

EVERY_POSITION = torch.iinfo(torch.int32).max


class PageTables:
    """Where every request's pages are. Shared by all index groups of an engine; written between forwards
    only.

    All int32, on the device, at fixed addresses:

    - `resident` [parts, requests, pages]: device block, -1 where the page cannot be read on the device
    - `host` [requests, pages]: host block, -1 where there is none (kept only for pages that are not resident)
    - `hot` [parts, regions, blocks]: device blocks of each hot region, in slot order
    - `hot_rows` [regions]: usable slots
    - `hot_region` [requests]: the request's region, -1 for none
    - `row_request` [requests]: request slot of each batch row of the step, -1 for padding
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        def full(*shape: int, value: int = -1) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self.resident = full(layout.num_parts, layout.max_requests, layout.max_pages)
        self.host = full(layout.max_requests, layout.max_pages)
        self.hot = full(layout.num_parts, layout.num_regions, layout.max_hot_blocks)
        self.hot_rows = full(layout.num_regions, value=0)
        self.hot_region = full(layout.max_requests)
        self.row_request = full(layout.max_requests)

    def _send(self, values: Sequence[Any]) -> torch.Tensor:
        return to_device(values, torch.int32, self.host.device)

    def clear(self, slots: list[int]) -> None:
        """Empty the rows of request slots that are about to be bound."""
        for slot in slots:
            self.resident[:, slot].fill_(-1)
            self.host[slot].fill_(-1)
            self.hot_region[slot].fill_(-1)

    def write_pages(self, writes: tuple[PageWrite, ...]) -> None:
        """Apply page deltas; the last one of a page wins."""
        entries = {(w.slot, w.page): w for w in writes}.values()
        num_parts, _, max_pages = self.resident.shape
        at, host = self._send(
            [[w.slot * max_pages + w.page for w in entries], [w.host_block for w in entries]]
        )
        blocks = self._send([block for w in entries for block in w.device_blocks]).view(-1, num_parts)
        at = at.long()
        self.host.view(-1).scatter_(0, at, host)
        self.resident.view(num_parts, -1).scatter_(1, at.expand(num_parts, -1), blocks.T)

    def write_region(self, write: RegionWrite) -> None:
        """Give a slot its region, or take it away."""
        self.hot_region[write.slot].fill_(write.region)
        if write.region >= 0:
            self.hot_rows[write.region].fill_(write.num_rows)
            num_blocks = len(write.device_blocks[0])
            self.hot[:, write.region, :num_blocks].copy_(self._send(write.device_blocks))

    def set_batch(self, slots: list[int]) -> None:
        """Request slots of this step's batch rows, in batch order."""
        padding = self.row_request.numel() - len(slots)
        self.row_request.copy_(self._send([*slots, *[-1] * padding]))


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
