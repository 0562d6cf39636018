"""A serving engine in modelled time: vLLM's scheduler and a coordinator are real, the rest is `Hardware`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_hisparse.connector import HiSparseWorkerMetadata
from vllm_hisparse.messages import decode
from vllm_hisparse.simulation.engine import EngineSize, SchedulerSide
from vllm_hisparse.simulation.hardware import Hardware
from vllm_hisparse.simulation.in_tree import InTreeCoordinator, in_tree_geometry
from vllm_hisparse.simulation.load import OUTPUT_TOKEN, AgenticLoad, Turn
from vllm_hisparse.simulation.worker import ModelledRank

__all__ = ["POLICIES", "Outcome", "Simulation"]

IDLE_S = 1e-3  # of a step without tokens, if no copy ends sooner

POLICIES: dict[str, Callable[[EngineSize], SchedulerSide]] = {
    "vllm": lambda size: SchedulerSide(size, hisparse=False),
    "in-tree": lambda size: SchedulerSide(
        size,
        coordinator=InTreeCoordinator,
        geometry=in_tree_geometry(size.model.shape, size.model.group_layers),
    ),
    "in-tree-packed": lambda size: SchedulerSide(size, coordinator=InTreeCoordinator),
    "hisparse": SchedulerSide,
    "hisparse-fcfs": lambda size: SchedulerSide(replace(size, max_passing=0)),
}
"""`in-tree` has vLLM's padded blocks, `in-tree-packed` ours, so that the policies alone differ. In
`hisparse-fcfs` no request passes another."""


@dataclass
class Outcome:
    """What happened after the warm-up, and the course of all of it."""

    policy: str
    seconds: float = 0.0
    decoding_s: float = 0.0  # sum over requests
    num_turns: int = 0
    num_preemptions: int = 0
    prefilled_tokens: int = 0
    new_tokens: int = 0  # of the turns that started: what had to be prefilled
    to_host_bytes: int = 0
    missed_bytes: int = 0  # misses and prefill staging
    restored_bytes: int = 0
    mean_run: float = 0.0  # host blocks that follow each other, over all of the run
    course: list[tuple[float, int, int]] = field(default_factory=list)  # (second, decoding, waiting)

    @property
    def mean_decoding(self) -> float:
        """Requests that decode, mean over time."""
        return self.decoding_s / self.seconds if self.seconds else 0.0

    @property
    def turns_per_s(self) -> float:
        return self.num_turns / self.seconds if self.seconds else 0.0

    @property
    def recomputed_tokens(self) -> int:
        """Tokens of prefixes that had been computed before."""
        return max(self.prefilled_tokens - self.new_tokens, 0)


class Simulation:
    """One engine under one load. Deterministic."""

    def __init__(
        self, policy: str, size: EngineSize, load: AgenticLoad, hardware: Hardware, warmup_s: float = 0.0
    ) -> None:
        self.side = POLICIES[policy](size)
        self.load = load
        self.hardware = hardware
        self.warmup_s = warmup_s
        self.outcome = Outcome(policy)
        self.now = 0.0
        self._rank = ModelledRank(size.model, hardware) if self.side.coordinator is not None else None
        starts = [(index * load.stagger_s, index, Turn(index, 0)) for index in range(load.num_sessions)]
        self._arrivals: list[tuple[float, int, Turn]] = starts  # a heap
        self._num_started = load.num_sessions
        self._turns: dict[str, Turn] = {}

    def run(self, duration_s: float) -> Outcome:
        """Serve for `duration_s` simulated seconds."""
        for _ in self.steps(duration_s):
            pass
        return self.outcome

    def steps(self, duration_s: float) -> Iterator[float]:
        """The same, step by step: yields the simulated time."""
        before = (0, 0, 0)
        while self.now < duration_s:
            if self.now >= self.warmup_s and not self.outcome.seconds:
                before = self._bytes()
            self._admit()
            if not self.side.scheduler.has_requests():
                self.now = self._arrivals[0][0]
                continue
            self._step()
            yield self.now
        after = self._bytes()
        outcome = self.outcome
        outcome.to_host_bytes, outcome.missed_bytes, outcome.restored_bytes = (
            b - a for a, b in zip(before, after, strict=True)
        )
        if self.side.coordinator is not None:
            outcome.mean_run = self.side.coordinator.leases.extents.mean_run

    def _bytes(self) -> tuple[int, int, int]:
        rank = self._rank
        return (0, 0, 0) if rank is None else (rank.spilled_bytes, rank.read_bytes, rank.restored_bytes)

    def _admit(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            turn = heapq.heappop(self._arrivals)[2]
            self._turns[turn.request_id] = turn
            self.side.add(turn.request_id, self.load.prompt(turn), self.load.output_tokens)
            if self.now >= self.warmup_s:
                self.outcome.new_tokens += self.load.num_new_tokens(turn)

    def _step(self) -> None:
        output = self.side.scheduler.schedule()
        seconds, num_decoding, num_prefilled = self._execute(output)
        counted = self.now >= self.warmup_s
        self.now += seconds
        ack = None if self._rank is None else self._rank.acknowledge(self.now)
        meta = None if ack is None else HiSparseWorkerMetadata(ack)
        self.side.scheduler.update_from_output(output, self.side.result(output, meta, OUTPUT_TOKEN))
        num_finished = self._finish(output)
        if counted:
            outcome = self.outcome
            outcome.seconds += seconds
            outcome.decoding_s += seconds * num_decoding
            outcome.prefilled_tokens += num_prefilled
            outcome.num_preemptions += len(output.preempted_req_ids or ())
            outcome.num_turns += num_finished
        self.outcome.course.append((self.now, num_decoding, len(self.side.scheduler.waiting)))

    def _execute(self, output: Any) -> tuple[float, int, int]:
        """(seconds that the step takes, requests that decode in it, tokens that it prefills)."""
        reading_s = 0.0
        if self._rank is not None:
            reading_s = self._rank.apply(decode(output.kv_connector_metadata.payload), self.now)
        num_decoding = context = num_prefilled = 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.side.scheduler.requests[request_id]
            end = request.num_computed_tokens
            if num_tokens == 1 and end > request.num_prompt_tokens:
                num_decoding += 1
                context += end
                reading_s += 0.0 if self._rank is None else self._rank.decode_s(request_id, end)
            else:
                num_prefilled += num_tokens
                reading_s += 0.0 if self._rank is None else self._rank.prefill_s(request_id)
        computing_s = self.hardware.decode_s(self.side.size.model, num_decoding, context)
        computing_s += self.hardware.prefill_s(num_prefilled)
        if computing_s:
            return computing_s + reading_s, num_decoding, num_prefilled
        ends = None if self._rank is None else self._rank.next_completion
        return max(IDLE_S, (ends or 0.0) - self.now), 0, 0

    def _finish(self, output: Any) -> int:
        """Start what follows the turns that ended with this step. Returns how many did."""
        ended = [r for r in output.num_scheduled_tokens if r not in self.side.scheduler.requests]
        for request_id in ended:
            turn = self.load.after(self._turns.pop(request_id), self._num_started)
            self._num_started += turn.number == 0
            heapq.heappush(self._arrivals, (self.now + self.load.pause_s, turn.session, turn))
        return len(ended)
