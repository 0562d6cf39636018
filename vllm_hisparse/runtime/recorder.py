"""Records selections of a running engine as a trace, within bounds.

One request at a time, from the first decode step that is seen of it to its end, then another of the batch: a
selection has top-k positions in every index group, and the whole batch's would fill any memory in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_hisparse.config import MIB, user_error
from vllm_hisparse.traces import Trace, save_trace

if TYPE_CHECKING:
    from vllm_hisparse.runtime.runtime import HiSparseRuntime

__all__ = ["Recorder"]

logger = init_logger("vllm.vllm_hisparse")

ENTRY_BYTES = 5  # int32 position, bool host
IDLE = -1


@dataclass
class _Recording:
    """The steps of one request: a range of the recorder's."""

    first: int
    end: int


class Recorder:
    """Selections of every index group, copied to host memory on the stream that makes them, and written to a
    file when the memory is full or the engine ends, whichever comes first.

    Called by the thread that runs the forwards. Never waits for the device before it writes. Its calls are
    not part of a CUDA graph: an engine that replays graphs would record nothing.
    """

    def __init__(self, runtime: HiSparseRuntime) -> None:
        """For a runtime whose layers are bound.

        Raises ValueError if the trace's folder does not exist or a step does not fit its memory.
        """
        layout, config, tables = runtime.layout, runtime.config, runtime.tables
        assert config.trace_path is not None
        self._path = Path(config.trace_path)
        if not self._path.parent.is_dir():
            raise user_error(
                got=f"trace_path={config.trace_path!r}",
                need="a file in a folder that exists",
                because="the trace is written when the engine ends",
            )
        groups, self._width = len(layout.index_groups), config.floor_hot_rows
        steps = config.trace_max_mib * MIB // (groups * self._width * ENTRY_BYTES)
        if steps < 2:
            raise user_error(
                got=f"trace_max_mib={config.trace_max_mib}",
                need=f"at least {-(-2 * groups * self._width * ENTRY_BYTES // MIB)}",
                because=f"a step selects up to {self._width} rows in each of {groups} index groups",
            )
        self._tables = tables
        self._page_tokens = layout.page_tokens
        self._parts = [parts[0] for parts in layout.group_parts]
        self._verify = torch.arange(config.verify_rows, device=tables.host.device)
        self._num_positions = layout.max_pages * layout.page_tokens
        pinned = tables.host.is_cuda
        shape = (steps, groups, self._width)
        self._top = torch.empty(shape, dtype=torch.int32, pin_memory=pinned)
        self._host = torch.empty(shape, dtype=torch.bool, pin_memory=pinned)
        self._newest = torch.empty(steps, dtype=torch.int32, pin_memory=pinned)
        self._writer = runtime.groups[0].handles[0]  # says where the step's rows go
        self._recordings: list[_Recording] = []
        self._slot = IDLE  # the request that is being recorded
        self._row = IDLE  # its row in the batch
        self._num_steps = 0
        self._done: set[int] = set()  # request slots whose owners were recorded
        self._written = False

    def begin_step(self, batch: list[int]) -> None:
        """The coming forward's request slots; empty for a forward of nobody."""
        if self._written or not batch:
            self._row = IDLE
            return
        if self._num_steps == len(self._top):
            self.write()
            return
        if self._slot == IDLE:
            self._start(batch)
        self._row = batch.index(self._slot) if self._slot in batch else IDLE
        if self._row != IDLE:
            self._top[self._num_steps] = -1  # of groups that do not report
            self._num_steps += 1
            self._recordings[-1].end = self._num_steps

    def end_request(self, slot: int) -> None:
        """The owner of a request slot has left."""
        self._done.discard(slot)
        if slot == self._slot:
            self._slot = IDLE

    def record(self, group: int, topk: torch.Tensor, query_start: torch.Tensor) -> None:
        """A leader's selection: int32 [T, K] positions of batch rows `query_start` int32 [R + 1]."""
        if self._row == IDLE:
            return
        bounds = query_start[self._row : self._row + 2]
        index = bounds[0] + self._verify  # [verify rows]
        # A prefill selects for more rows: hot regions do not serve it.
        used = (index < bounds[1]) & (bounds[1] - bounds[0] <= len(self._verify))
        position = topk[index.clamp(max=topk.shape[0] - 1)]  # [verify rows, K]
        used = used[:, None] & (position >= 0) & (position < self._num_positions)
        page = torch.where(used, position // self._page_tokens, 0)
        tables, slot = self._tables, self._slot
        on_host = (tables.resident[self._parts[group], slot][page] < 0) & (tables.host[slot][page] >= 0)
        step = self._num_steps - 1
        self._top[step, group].copy_(position.masked_fill(~used, -1).flatten(), non_blocking=True)
        self._host[step, group].copy_((on_host & used).flatten(), non_blocking=True)
        if group == 0:
            self._newest[step].copy_(self._last_position(bounds[1] - 1), non_blocking=True)

    def _last_position(self, token: torch.Tensor) -> torch.Tensor:
        """Position of the row that the batch's `token` writes, found by the page that it goes to."""
        assert self._writer.slot_mapping is not None
        slot = self._writer.slot_mapping[token]
        resident = self._tables.resident[self._writer.part, self._slot]  # [pages]
        page = (resident == slot // self._page_tokens).int().argmax()
        return page * self._page_tokens + slot % self._page_tokens

    def write(self) -> None:
        """Write what there is, once; afterwards nothing is recorded. Waits for the device.

        An engine does not fail for its trace: that a file could not be written is logged.
        """
        if self._written:
            return
        self._written = True
        self._row = IDLE
        if self._tables.host.is_cuda:
            torch.cuda.synchronize()
        trace = self._trace()
        if trace is None:
            logger.warning("HiSparse: no decode step was recorded, %s is not written", self._path)
            return
        try:
            save_trace(self._path, trace)
        except OSError as error:
            logger.error("HiSparse: the trace could not be written: %s", error)
        else:
            logger.info(
                "HiSparse: %d streams of up to %d steps recorded in %s",
                trace.num_streams,
                trace.num_steps,
                self._path,
            )

    def _start(self, batch: list[int]) -> None:
        """Record the first request of the batch that was not recorded before."""
        self._slot = next((slot for slot in batch if slot not in self._done), IDLE)
        if self._slot != IDLE:
            self._done.add(self._slot)
            self._recordings.append(_Recording(self._num_steps, self._num_steps))

    def _trace(self) -> Trace | None:
        """Streams of one length, [requests x groups, steps, width]; None without a step."""
        selected = (self._top[: self._num_steps] >= 0).any(-1).any(-1).numpy()  # not a prefill
        steps = [r.first + np.flatnonzero(selected[r.first : r.end]) for r in self._recordings]
        kept = _longest(steps, len(self._top))
        if not kept:
            return None
        top, host, new = self._top.numpy(), self._host.numpy(), self._newest.numpy()
        longest, groups = max(len(s) for s in kept), top.shape[1]
        trace_top = np.full((len(kept), groups, longest, self._width), -1, dtype=np.int32)
        trace_host = np.zeros(trace_top.shape, dtype=bool)
        newest = np.full((len(kept), groups, longest), -1, dtype=np.int32)
        for i, index in enumerate(kept):
            trace_top[i, :, : len(index)] = top[index].swapaxes(0, 1)
            trace_host[i, :, : len(index)] = host[index].swapaxes(0, 1)
            newest[i, :, : len(index)] = new[index]
        streams = len(kept) * groups
        return Trace(
            top=trace_top.reshape(streams, longest, -1),
            newest=newest.reshape(streams, longest),
            host=trace_host.reshape(streams, longest, -1),
            group=np.tile(np.arange(groups, dtype=np.int32), len(kept)),
            request=np.repeat(np.arange(len(kept), dtype=np.int32), groups),
        )


def _longest(steps: list[np.ndarray], capacity: int) -> list[np.ndarray]:
    """The longest of the recordings, in their order, as many as fit `capacity` steps at the longest's length.

    Streams of a trace are padded to one length: many short ones beside a long one would blow it up.
    """
    by_length = sorted((i for i, s in enumerate(steps) if len(s)), key=lambda i: -len(steps[i]))
    if not by_length:
        return []
    fit = max(1, capacity // len(steps[by_length[0]]))
    return [steps[i] for i in sorted(by_length[:fit])]
