"""Everything HiSparse owns on one worker's device, and what a step changes of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vllm_hisparse import ops
from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.messages import Binding, Copy, PageWrite, RegionWrite
from vllm_hisparse.planning.layout import Layout

from .counters import Counters, MissProbe
from .heat import HeatProbe
from .memory import Memory
from .prefill import PrefillGather
from .recorder import Recorder
from .resolver import GroupResolver, ResultBuffers
from .staging import Staging
from .step import StepShape
from .tables import BatchRow, PageTables
from .transfer import to_device

if TYPE_CHECKING:
    from .index_group import HiSparseIndexGroup

__all__ = ["HiSparseRuntime"]

NO_REGION = (-1, 0)


class HiSparseRuntime:
    """Pools, tables and resolvers of one worker.

    Called between forwards, on the thread and stream that run them.
    """

    def __init__(
        self,
        layout: Layout,
        config: HiSparseConfig,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group`: the replica's ranks, of which those on this node share a host pool."""
        self.layout = layout
        self.config = config
        self.device = device
        self.memory = Memory(layout, device, group)
        self.tables = PageTables(layout, device)
        self.staging = Staging(self, device)
        self.prefill = PrefillGather(self) if device.type == "cuda" else None
        self.step = StepShape(None, ())
        self.counters = Counters(len(layout.index_groups), device)
        self.heat = HeatProbe(layout, device)
        self.misses = MissProbe(len(layout.index_groups), layout.max_requests, device)
        self.recorder: Recorder | None = None  # of selections; set on the rank that records them
        self.fence: Callable[[], Callable[[], bool]] = lambda: lambda: True  # see `CopyQueue.fence`
        self.num_spilled_pages = 0
        self.num_restored_pages = 0
        self.resolvers: list[GroupResolver] = []
        self.groups: list[HiSparseIndexGroup] = []
        self._result: ResultBuffers | None = None
        self.batch: list[int] = []  # request slot of each batch row
        self.is_resident = True  # every page of the batch can be read on the device
        self._regions: dict[int, tuple[int, int]] = {}  # request slot -> (hot region, its usable slots)
        self._host_only: dict[int, set[int]] = {}  # request slot -> pages that only the host has
        self._host_backed: set[int] = set()  # request slots that have such pages
        self._batch_is_stale = False  # the tables' batch rows say less than the last two do

    def add_group(self, group: "HiSparseIndexGroup") -> None:
        """Connect the next index group, in layer order."""
        if self._result is None:
            max_rows, top_k = group.logical_topk_indices.shape
            planned = min(self.config.floor_hot_rows, self.layout.max_hot_rows)
            self._result = ResultBuffers(self.layout, max_rows, top_k, planned, self.device)
        resolver = GroupResolver(self, len(self.resolvers), self._result, self.device)
        self.resolvers.append(resolver)
        self.groups.append(group)
        group.resolver = resolver

    def bind(self, bindings: tuple[Binding, ...]) -> None:
        """Request slots start afresh."""
        slots = [b.slot for b in bindings]
        self.tables.clear(slots)
        self.heat.forget(slots)
        for slot in slots:
            self._host_only[slot] = set()
            self._host_backed.discard(slot)
            self._regions.pop(slot, None)
        self._batch_is_stale = True

    def unbind(self, slot: int) -> None:
        """The request of a slot has left it."""
        if self.recorder is not None:
            self.recorder.end_request(slot)

    def write_regions(self, writes: tuple[RegionWrite, ...]) -> None:
        """Hand out hot regions, resize them or take them away. Rows in surviving slots stay."""
        for write in writes:
            if write.region >= 0:
                self._regions[write.slot] = write.region, write.num_rows
                self.tables.write_region(write.region, write.device_blocks)
            else:
                self._regions.pop(write.slot, None)
        self._batch_is_stale = True
        num_kept = {write.region: write.num_kept for write in writes if write.region >= 0}
        if num_kept:
            for resolver in self.resolvers:
                resolver.state.keep(num_kept)

    def write_pages(self, writes: tuple[PageWrite, ...]) -> None:
        """Apply residency deltas."""
        self.tables.write_pages(writes)
        for write in writes:
            pages = self._host_only[write.slot]
            (pages.add if write.device_blocks[0] < 0 else pages.discard)(write.page)
            if bool(pages) != (write.slot in self._host_backed):
                (self._host_backed.add if pages else self._host_backed.discard)(write.slot)
                self._batch_is_stale = True

    def set_batch(self, slots: list[int]) -> None:
        """Request slots of the coming forward's batch rows; an empty list makes every row padding."""
        if self._batch_is_stale or slots != self.batch:
            self.batch, self._batch_is_stale = slots, False
            self.tables.set_batch([self._batch_row(slot) for slot in slots])
        if self.recorder is not None:
            self.recorder.begin_step(slots)
        self.is_resident = self._host_backed.isdisjoint(slots) if self._host_backed else True

    def _batch_row(self, slot: int) -> BatchRow:
        """Without a region where nothing can be wanted from it: then the resolver does not look at it."""
        region, num_slots = self._regions.get(slot, NO_REGION) if slot in self._host_backed else NO_REGION
        return slot, region, num_slots

    def sample_misses(self) -> dict[int, int]:
        """Rows that the latest sampled step read from the host, by request slot, for slots with a region."""
        return {slot: n for slot, n in self.misses.sample(self.batch).items() if slot in self._regions}

    def sample_heat(self) -> dict[int, tuple[int, ...]]:
        """Pages that the selections of decodes touch most, by request slot, hottest first.

        Reads what the forward has left: the model's leaders write their selections to one place, the last of
        them stays. Nothing here is noted when a leader resolves, for a graph that is replayed runs no Python.
        """
        if not self.batch:
            return {}
        rows, batch_rows = self.step.decode_rows(self.config.verify_rows)
        owners = [self.batch[row] for row in batch_rows]
        return self.heat.sample(self.groups[0].logical_topk_indices, rows, owners)

    def num_host_only(self, slot: int) -> int:
        """Pages of the request slot that only the host has."""
        return len(self._host_only[slot])

    def spill(self, copies: tuple[Copy, ...]) -> None:
        """Copy pages of all layers to the host pool, one launch on the current stream.

        Of the ranks that share a pool one copies; on the others the stream waits until it has. Between
        `memory.turns.begin` and the next one.
        """
        turns = self.memory.turns
        turns.take(lambda: self._copy(ops.write_pages, copies))
        self.num_spilled_pages += len(copies) if turns.is_writer else 0

    def write_imported(self, copies: tuple[Copy, ...]) -> None:
        """Copy pages from another engine to the host pool, on the rank of the node that writes it.

        Out of turn: no rank reads the blocks before all ranks have reported the import's end. What they held
        before, this rank has passed (`CopyQueue.fence`); another may be behind by copies back for requests
        that are gone, which nobody reads, but by no forward, for in every layer this rank's waits for all.
        """
        self._copy(ops.write_pages, copies)

    def restore(self, copies: tuple[Copy, ...]) -> None:
        """Copy pages of all layers back to the device pool, one launch on the current stream."""
        self._copy(ops.read_pages, copies)
        self.num_restored_pages += len(copies)

    def _copy(self, direction: Callable[..., None], copies: tuple[Copy, ...]) -> None:
        layers = self.memory.layers
        device_blocks = to_device([c.device_blocks for c in copies], torch.int32, self.device)
        direction(
            self.memory.device_pool,
            self.memory.host_pool,
            device_blocks.T.contiguous(),
            to_device([c.host_block for c in copies], torch.int32, self.device),
            layers.offset,
            layers.part,
            layers.host_offset,
            layers.host_row_stride,
            row_bytes=self.layout.row_bytes,
            block_size=self.layout.page_tokens,
            block_stride_bytes=self.layout.block_stride_bytes,
        )
