"""The worker side: applies the scheduler's messages to the runtime and counts what it has done."""

import torch
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_hisparse.messages import Acknowledgement, Progress, Sampling, StepMessage, decode
from vllm_hisparse.runtime.runtime import HiSparseRuntime
from vllm_hisparse.runtime.step import StepShape

from .copies import CopyQueue

__all__ = ["HiSparseWorker"]

HEAT_SAMPLE_STEPS = 32
MISS_SAMPLE_STEPS = 16  # regions grow slowly, so a look now and then is enough
REPEAT_STEPS = 16  # a rank says this often how far it is, also without news: a report may have been lost
MAX_FAILURES = 16  # transfers; with more the error ends the engine, for pages would be tried for ever

logger = init_logger("vllm.vllm_hisparse")


class HiSparseWorker:
    """One rank. Knows requests only by their slots; the scheduler names each once, when it is bound."""

    def __init__(
        self, runtime: HiSparseRuntime, copies: CopyQueue, *, rank: int, has_dummy_steps: bool
    ) -> None:
        """`rank`: in acknowledgements. `has_dummy_steps`: the engine runs forwards that are no step's (data
        parallelism).
        """
        self.runtime = runtime
        runtime.fence = copies.fence
        self._rank = rank
        self._copies = copies
        self._has_dummy_steps = has_dummy_steps
        self._slots: dict[str, int] = {}
        self._request_ids: list[str] = []  # of the latest step's batch
        self._batch: list[int] = []  # and their slots
        self._enqueued = -1  # last transfer of a message
        self._completed = -1
        self._failed: list[int] = []
        self._reported = Progress()
        self._sampling = Sampling()
        self._has_old_misses = False  # the next sample may be of slots' former owners
        self._misses: dict[int, int] = {}
        self._heat: dict[int, tuple[int, ...]] = {}
        self._num_steps = 0

    def begin_step(
        self, payload: bytes, request_ids: list[str], scheduler_output: SchedulerOutput | None = None
    ) -> None:
        """Apply one message, before the forward of the batch `request_ids` (batch order; empty: no forward).

        `scheduler_output`: sizes of prefills are read from it.
        """
        self.runtime.step = StepShape(scheduler_output, request_ids)
        message = decode(payload)
        if not message.is_empty:
            self._apply(message)
        if not message.is_empty or request_ids != self._request_ids:
            self._request_ids = list(request_ids)
            self._batch = [self._slots[r] for r in request_ids]
        self.runtime.set_batch(self._batch)

    def end_step(self) -> None:
        """After the forward and any drafting.

        A forward that is no step's must not touch a request's state.
        """
        self._num_steps += 1
        if self._sampling.misses and self._num_steps % MISS_SAMPLE_STEPS == 0:
            misses = self.runtime.sample_misses()
            self._misses = {} if self._has_old_misses else misses
            self._has_old_misses = False
        if self._sampling.heat and self._num_steps % HEAT_SAMPLE_STEPS == 0:
            self._heat = self.runtime.sample_heat()
        if self._has_dummy_steps:
            self.runtime.set_batch([])

    def take_acknowledgement(self) -> Acknowledgement | None:
        """The rank's progress, if there is news or it is time to repeat it, and what was sampled since the
        last call; None if nothing.
        """
        for transfer_id in self._copies.take_completed():
            _check_order("completed", transfer_id, self._completed)
            self._completed = transfer_id
        progress = Progress(self._enqueued, self._completed, tuple(self._failed))
        is_due = progress != self._reported or self._num_steps % REPEAT_STEPS == 0
        self._reported = progress
        misses, self._misses = self._misses, {}
        heat, self._heat = self._heat, {}
        if not (is_due or misses or heat):
            return None
        return Acknowledgement({self._rank: progress}, misses, heat)

    def _apply(self, message: StepMessage) -> None:
        runtime = self.runtime
        for request_id in message.unbind:
            runtime.unbind(self._slots.pop(request_id))
        if message.bind:
            self._slots.update(message.bind)
            runtime.bind(message.bind)
        self._copies.wait(message.wait)
        if message.regions:
            runtime.write_regions(message.regions)
        if message.pages:
            runtime.write_pages(message.pages)
        if message.transfer_id >= 0:
            self._submit(message)
        if message.sampling is not None:
            if not self._sampling.misses:
                self._has_old_misses = True
            self._sampling = message.sampling

    def _submit(self, message: StepMessage) -> None:
        """Enqueue the message's copies. If that fails, the scheduler is told, and the pages stay where they
        are.
        """
        _check_order("message", message.transfer_id, self._enqueued)
        self._enqueued = message.transfer_id
        if message.spill:
            self.runtime.memory.turns.begin()
        try:
            self._copies.submit(message.transfer_id, lambda: self._copy(message))
        except torch.AcceleratorError:
            raise  # nothing works on this device any more
        except RuntimeError as error:
            self._failed.append(message.transfer_id)
            if len(self._failed) > MAX_FAILURES:
                raise
            logger.error(
                "HiSparse: rank %d could not enqueue transfer %d (%d pages to the host, %d back); they stay "
                "where they are: %s",
                self._rank,
                message.transfer_id,
                len(message.spill),
                len(message.restore),
                error,
            )

    def _copy(self, message: StepMessage) -> None:
        if message.spill:
            self.runtime.spill(message.spill)
        if message.restore:
            self.runtime.restore(message.restore)


def _check_order(what: str, transfer_id: int, last: int) -> None:
    """Raise RuntimeError unless the transfer follows the last one: progress says nothing about gaps."""
    if transfer_id != last + 1:
        raise RuntimeError(f"{what}: transfer {transfer_id} follows transfer {last}; need the next one")
