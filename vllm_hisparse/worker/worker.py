"""The worker side: applies the scheduler's messages to the runtime and counts what it has done."""

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_hisparse.messages import Acknowledgement, StepMessage, decode
from vllm_hisparse.runtime.runtime import HiSparseRuntime
from vllm_hisparse.runtime.step import StepShape

from .copies import CopyQueue

__all__ = ["HiSparseWorker"]

HEAT_SAMPLE_STEPS = 32
MISS_SAMPLE_STEPS = 16  # regions grow slowly, so a look now and then is enough


class HiSparseWorker:
    """One rank. Knows requests only by their slots; the scheduler names each once, when it is bound."""

    def __init__(self, runtime: HiSparseRuntime, copies: CopyQueue, *, has_dummy_steps: bool) -> None:
        """`has_dummy_steps`: the engine runs forwards that are no step's (data parallelism)."""
        self.runtime = runtime
        self._copies = copies
        self._has_dummy_steps = has_dummy_steps
        self._slots: dict[str, int] = {}
        self._request_ids: list[str] = []  # of the latest step's batch
        self._batch: list[int] = []  # and their slots
        self._enqueued: dict[int, int] = {}
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
        if self._num_steps % MISS_SAMPLE_STEPS == 0:
            self._misses = self.runtime.sample_misses()
        if self._num_steps % HEAT_SAMPLE_STEPS == 0:
            self._heat = self.runtime.sample_heat()
        if self._has_dummy_steps:
            self.runtime.set_batch([])

    def take_acknowledgement(self) -> Acknowledgement | None:
        """What was enqueued, completed and sampled since the last call; None if nothing."""
        completed = dict.fromkeys(self._copies.take_completed(), 1)
        enqueued, self._enqueued = self._enqueued, {}
        misses, self._misses = self._misses, {}
        heat, self._heat = self._heat, {}
        if not (enqueued or completed or misses or heat):
            return None
        return Acknowledgement(enqueued, completed, misses, heat)

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
            self._copies.submit(message.transfer_id, lambda: self._copy(message))
            self._enqueued[message.transfer_id] = 1

    def _copy(self, message: StepMessage) -> None:
        if message.spill:
            self.runtime.spill(message.spill)
        if message.restore:
            self.runtime.restore(message.restore)
