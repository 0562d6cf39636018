"""vLLM's own scheduler with our connector's scheduler role, driven step by step against naive ranks.

`SchedulerRig` stands for engine core and workers: it executes each step's message and tokens on `ranks.Rank`,
samples, and returns acknowledgements when the test says that copies have ended. After every call it checks
the coordinator's invariants, and that nothing is published before it is written.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from vllm_hisparse.connector import HiSparseMetadata, HiSparseWorkerMetadata
from vllm_hisparse.messages import Acknowledgement, StepMessage, decode
from vllm_hisparse.scheduler.coordinator import HiSparseCoordinator
from vllm_hisparse.scheduler.integrity import check
from vllm_hisparse.scheduler.records import Record

from .borrowing import Borrowing
from .engine_config import EngineOptions, build_scheduler, make_kv_cache_config, make_vllm_config
from .harness import leaves
from .model_runner import ModelRunner, WorkerRequest
from .offloading_ranks import OffloadingRanks
from .ranks import CopyTiming, Rank, Span
from .reports import step_metadata, step_result
from .state import full_state

__all__ = ["ALL", "SchedulerRig"]

ALL = 1 << 30  # every transfer


class SchedulerRig:
    """One engine without a model.

    Args:
        options: the engine.
        directory: where the model's config.json goes.
        timing: when the ranks' asynchronous copies touch memory; "late" finds a missing wait.
        seed: of drafts' luck.
        shares_pool: whether the ranks have one host pool, which the first of them writes.
    """

    def __init__(
        self,
        options: EngineOptions,
        directory: Path,
        timing: CopyTiming = "late",
        seed: int = 0,
        shares_pool: bool = False,
    ) -> None:
        self.options = options
        self.config = make_vllm_config(options, directory)
        kv_cache_config = make_kv_cache_config(self.config, options)
        self.scheduler, self.hasher = build_scheduler(self.config, kv_cache_config)
        ours, *others = leaves(self.scheduler.connector)
        self.coordinator: HiSparseCoordinator = ours.coordinator
        self.borrowing = Borrowing(options.page_tokens) if options.nixl_role == "kv_consumer" else None
        if options.nixl_role is not None:
            others.clear()
        indexer_tokens = options.page_tokens * options.indexer_pages
        self.ranks = [
            Rank(number, options.page_tokens, options.num_parts, indexer_tokens, timing)
            for number in range(options.num_ranks)
        ]
        for rank in self.ranks[1:] if shares_pool else ():
            rank.share(self.ranks[0])
        self.offloading = [
            OffloadingRanks(self.ranks, child.scheduler, self.config, kv_cache_config) for child in others
        ]
        self.model = ModelRunner(options, seed)
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.messages: list[StepMessage] = []
        self.outputs: dict[str, list[int]] = {}
        self.lent: dict[str, dict[str, Any]] = {}  # requests that have ended -> what another engine is told
        self.read: set[str] = set()  # of these, those that it has read since the last step
        self.num_refused = 0
        self._reset_at = -1  # steps by the last reset of offloaded keys
        self.num_resets = 0
        self.num_lost_reports = 0
        self.acks: list[Acknowledgement] = []  # all that were sent, arrived or not
        self.num_misses = 0  # that every scheduled request reports of its selections
        self.watch_refusals = False
        self._admits_nobody = False
        self._order = random.Random(seed)
        self._adopted: dict[Record, int] = {}  # tokens of the prefix hit that it started on
        self._adopt = self.coordinator.adopt
        self.coordinator.adopt = self._watched_adopt
        self._allocate = self.scheduler.kv_cache_manager.allocate_slots
        self.scheduler.kv_cache_manager.allocate_slots = self._watched_allocate

    # ---- what a client does

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 8,
        transfer: dict[str, Any] | None = None,
        *,
        priority: int = 0,
    ) -> Any:
        """A request arrives, with `kv_transfer_params` if another engine has a part in it."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args=None if transfer is None else {"kv_transfer_params": transfer},
            ),
            pooling_params=None,
            block_hasher=self.hasher,
            priority=priority,
        )
        self.scheduler.add_request(request)
        self.outputs[request_id] = []
        return request

    def abort(self, request_id: str) -> None:
        """A client leaves."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.check()

    def preempt(self) -> None:
        """The last running request loses its blocks, as if the pool had been full."""
        self.scheduler._preempt_request(self.scheduler.running.pop(), 0.0)
        self._admits_nobody = bool(self.offloading)  # vLLM's OffloadingConnector relies on it
        self.check()

    def reset(self, running: bool = True) -> bool:
        """New weights: forget every prefix, preempting what runs if `running`.

        From then on content of the old weights is wrong.
        """
        # Twice without a step in between fails in vLLM's OffloadingConnector; once is enough for its keys.
        offloaded = bool(self.offloading) and self._reset_at != len(self.messages)
        if offloaded:
            self._reset_at = len(self.messages)
        done = bool(self.scheduler.reset_prefix_cache(running, reset_connector=offloaded))
        self.num_resets += done
        self.check()
        return done

    # ---- what goes wrong on the way

    def repeat_report(self, which: int) -> None:
        """An acknowledgement arrives that has arrived before, was lost, or is ahead of its step's output."""
        old = [ack for ack in self.acks if ack.progress]
        if old:
            self.coordinator.acknowledge(old[which % len(old)])
            self.check()

    # ---- what the engine core does

    def step(self, *num_completed: int) -> None:
        """Schedule and execute a step; with as many in flight as the engine allows, process the oldest.

        `num_completed`: transfers that each rank's copy stream ends during the step; all by default.
        """
        if self.scheduler.has_requests():
            self.submit(*num_completed)
            if len(self.in_flight) < self.config.max_concurrent_batches:
                return
        if self.in_flight:
            self.collect()

    def submit(self, *num_completed: int) -> StepMessage:
        """Schedule a step and execute it on every rank. Returns its message."""
        output = self._schedule()
        meta, *others = step_metadata(output)
        assert isinstance(meta, HiSparseMetadata)
        message = decode(meta.payload)
        nixl = others.pop() if self.options.nixl_role is not None else None
        self.messages.append(message)
        if self.borrowing is not None and nixl is not None:
            self.borrowing.accept(nixl.payload)
        self.check()
        spans, sampled = self.model.run(output, self.num_resets, self._num_shared)
        counts = list(zip(self.ranks, num_completed or [ALL] * len(self.ranks), strict=True))
        self._order.shuffle(counts)  # ranks that share a pool need no particular one
        reports = [self._execute(rank, count, message, spans, *deepcopy(others)) for rank, count in counts]
        received = {request_id for side in self.offloading for request_id in side.take_received()}
        failed: set[str] = set()
        if self.borrowing is not None:
            received, failed = self.borrowing.take_ended()
        sent, self.read = self.read, set()
        self.in_flight.append((output, step_result(sampled, reports, received, failed, sent)))
        return message

    def _schedule(self) -> Any:
        """vLLM admits nobody in a step that preempts."""
        from vllm.v1.core.sched.interface import PauseState

        if self._admits_nobody:
            self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        output = self.scheduler.schedule()
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._admits_nobody = False
        return output

    def _execute(
        self, rank: Rank, count: int, message: StepMessage, spans: list[Span], *others: Any
    ) -> list[Any]:
        """A step on one rank. Returns each connector's report."""
        sides = list(zip(self.offloading, others, strict=True))
        for side, meta in sides:
            side.begin(rank.number, meta)
        rank.apply(message)
        if self.borrowing is not None:
            self.borrowing.write(rank)
        for side, meta in sides:
            side.load(rank.number, meta)
        rank.forward(spans)
        rank.complete(count)
        misses = {rank.slots[span.request_id]: self.num_misses for span in spans if self.num_misses}
        ack = rank.take_acknowledgement(misses)
        if ack is not None:
            self.acks.append(ack)
            self.num_lost_reports += rank.is_silent
        ours = None if ack is None or rank.is_silent else HiSparseWorkerMetadata(ack)
        nixl = [] if self.options.nixl_role is None else [None]
        return [ours, *(side.end(rank.number, meta, count) for side, meta in sides), *nixl]

    def collect(self) -> None:
        """Process the oldest step's output."""
        output, result = self.in_flight.popleft()
        for outputs in self.scheduler.update_from_output(output, result).values():
            for item in outputs.outputs:
                self.outputs[item.request_id] += item.new_token_ids
                if item.kv_transfer_params is not None:
                    self.lent[item.request_id] = item.kv_transfer_params
        if self.options.num_drafts and not self.options.async_scheduling:
            self._propose(list(output.num_scheduled_tokens))
        self.check()

    def run(self, max_steps: int = 400) -> None:
        """Step until all requests have finished and all transfers have ended; then nothing may be held."""
        for _ in range(max_steps):
            if not (self.scheduler.has_requests() or self.in_flight):
                break
            if self.borrowing is not None:
                self.borrowing.deliver_all(self.ranks, self.prompt_digests)
            self.step()
        assert not self.scheduler.has_requests(), f"no end after {max_steps} steps"
        self.check()
        for pool in (self.coordinator.pool, self.coordinator.host_pool):
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are held by nobody"
        assert len(self.coordinator.ledger) == 0
        assert not self.coordinator.records
        assert not self.coordinator.leases.extents._wanted
        assert not self.coordinator.requests
        for side in self.offloading:
            side.check_idle()

    def check(self) -> None:
        """The coordinator's invariants, and that every published host page is written on every rank."""
        check(self.coordinator, [b for _, blocks in self.scheduler.deferred_frees for b in blocks])
        published = {b.block_id for b in self.coordinator.host_pool.blocks if b.block_hash is not None}
        for rank in self.ranks:
            assert not published & rank.host_blocks_being_written(), "published before it is written"

    # ---- what it does for the test

    def _propose(self, request_ids: list[str]) -> None:
        from vllm.v1.outputs import DraftTokenIds

        drafts = [[0] * self.options.num_drafts for _ in request_ids]
        self.scheduler.update_draft_token_ids(DraftTokenIds(request_ids, drafts))

    def prompt_digests(self, request_id: str) -> list[int]:
        """What the rows of a request's tokens hold so far."""
        tokens = list(self.scheduler.requests[request_id].all_token_ids)
        return WorkerRequest(tokens, 0, [], self.num_resets).context([], len(tokens))

    def deliver(self, request_id: str, failed: bool = False) -> None:
        """The transfer of an import ends with the next step: with every page written, or as a failure."""
        assert self.borrowing is not None
        self.borrowing.deliver(request_id, self.ranks, self.prompt_digests, failed)

    def _watched_adopt(self, request_id: str, blocks: Any) -> None:
        self._adopt(request_id, blocks)
        record = self.coordinator.records[request_id]
        self._adopted[record] = len(blocks) * self.options.page_tokens

    def _num_shared(self, request_id: str) -> int:
        return self._adopted.get(self.coordinator.records[request_id], 0)

    def _watched_allocate(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `allocate_slots`; a refusal must not have changed anything."""
        before = full_state(self.coordinator) if self.watch_refusals else None
        blocks = self._allocate(*args, **kwargs)
        if blocks is None:
            self.num_refused += 1
            assert before is None or before == full_state(self.coordinator), (
                "a refused allocation changed state"
            )
        return blocks
