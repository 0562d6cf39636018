"""A tiny engine in this process whose parts a test can look at: steps one by one, page states, pools, leaks.

`HiSparseEngine` wraps an `LLM` of `testing.engine`. With HiSparse on, its coordinator and its worker are
plain attributes, and `finish` checks that every lease was given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_hisparse.config import CONNECTOR, MULTI_CONNECTOR

from . import engine as engines
from .engine import Completion

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_hisparse.connector import HiSparseConnector
    from vllm_hisparse.peers.reader import Reader
    from vllm_hisparse.runtime.runtime import HiSparseRuntime
    from vllm_hisparse.scheduler.coordinator import HiSparseCoordinator
    from vllm_hisparse.scheduler.residency import PageState
    from vllm_hisparse.worker.copies import CopyQueue
    from vllm_hisparse.worker.worker import HiSparseWorker

__all__ = [
    "OPTIONS",
    "HiSparseEngine",
    "LateCopies",
    "Prompt",
    "hisparse",
    "hisparse_engine",
    "leaves",
    "multi",
    "total_blocks",
]

MAX_IDLE_STEPS = 50  # steps after the last request in which every transfer has to be acknowledged

# A pool under pressure all the time; pages of 64 tokens are prefix hits.
OPTIONS: dict[str, Any] = {
    "host_pool_gib": 0.05,
    "low_watermark": 0.5,
    "high_watermark": 0.6,
    "prefix_share": 0.0,
    "prefill_staging_mib": 8,
    "max_indexer_pages": 1,
}


@dataclass(frozen=True)
class Prompt:
    """A greedy request that produces `num_tokens` tokens."""

    token_ids: tuple[int, ...]
    num_tokens: int


def hisparse(**options: Any) -> dict[str, Any]:
    """Connector configuration with `options` before `OPTIONS`."""
    extra = {key: value for key, value in {**OPTIONS, **options}.items() if value is not None}
    return {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    """Configuration of a MultiConnector."""
    return {
        "kv_connector": MULTI_CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


@contextmanager
def hisparse_engine(model: Path, **engine_args: Any) -> Iterator[HiSparseEngine]:
    """An engine in this process, taken down on exit. HiSparse is on if there is a `kv_transfer_config`."""
    with engines.engine(model, **engine_args) as llm:
        yield HiSparseEngine(llm)


class HiSparseEngine:
    """Runs requests and gives access to both sides."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.completions: dict[str, Completion] = {}  # of requests that have ended, by request id
        self.num_steps = 0
        self._num_added = 0
        self._has_hisparse = llm.llm_engine.vllm_config.kv_transfer_config is not None

    # ---- parts

    @property
    def core(self) -> Any:
        """vLLM's engine core."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.scheduler

    @property
    def coordinator(self) -> HiSparseCoordinator:
        """HiSparse's scheduler side."""
        coordinator = _find(self.scheduler.connector).coordinator
        assert coordinator is not None
        return coordinator

    @property
    def worker(self) -> HiSparseWorker:
        """HiSparse's worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = _find(get_kv_transfer_group()).worker
        assert worker is not None
        return worker

    @property
    def reader(self) -> Reader:
        """What reads other engines' pages, of a consumer."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        reader = get_kv_transfer_group()._connectors[1].reader
        assert reader is not None
        return reader

    @property
    def runtime(self) -> HiSparseRuntime:
        """The worker's pools, tables and resolvers."""
        return self.worker.runtime

    @property
    def rows(self) -> dict[str, int]:
        """What the resolvers counted: hits, misses, resident, overflow, unreadable."""
        return self.runtime.counters.exact()

    @property
    def pages(self) -> dict[str, int]:
        """What happened to pages: spilled, restored, lost, host_hits, ..."""
        return vars(self.coordinator.leases.counters)

    @property
    def num_preemptions(self) -> int:
        """Requests that vLLM has preempted since start."""
        return int(engines.counters(self.llm)["vllm:num_preemptions"])

    def use_copies(self, copies: CopyQueue) -> None:
        """Run page copies in `copies` from now on. Only while none is in flight."""
        assert not len(self.coordinator.ledger)
        self.worker._copies = copies

    def requests_with(self, state: PageState) -> list[str]:
        """Ids of requests that have a page in `state`, as `add` returned them."""
        records = self.coordinator.records.values()
        return [_external(r.request_id) for r in records if r.pages.count(state)]

    def requests_in(self, status: Any) -> list[str]:
        """Ids of requests that vLLM's scheduler has in `status`, a `RequestStatus`."""
        return [_external(r.request_id) for r in self.scheduler.requests.values() if r.status is status]

    # ---- running

    def run(self, prompts: Sequence[Prompt], each_step: Callable[[], None] | None = None) -> list[Completion]:
        """All prompts at once, to their ends; `each_step` is called after every step."""
        request_ids = [self.add(prompt) for prompt in prompts]
        self.drain(each_step)
        return [self.completions[request_id] for request_id in request_ids]

    def drain(self, each_step: Callable[[], None] | None = None) -> None:
        """Step until no request is left."""
        while self.num_unfinished:
            self.step()
            if each_step is not None:
                each_step()

    def add(self, prompt: Prompt, **extra_args: Any) -> str:
        """Queue a request, with vLLM's `extra_args`; returns its id."""
        request_id = f"r{self._num_added}"
        self._num_added += 1
        params = engines.greedy(prompt.num_tokens)
        params.extra_args = extra_args or None
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt.token_ids)}, params)
        return request_id

    def abort(self, request_id: str) -> None:
        """Abort a request; it will have no completion."""
        self.llm.llm_engine.abort_request([request_id])

    def step(self) -> None:
        """One step of the engine."""
        self.num_steps += 1
        for output in self.llm.llm_engine.step():
            if output.finished:
                self.completions[output.request_id] = engines.completion(output)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self.llm.llm_engine.get_num_unfinished_requests()

    # ---- checks

    def check_integrity(self) -> None:
        """Every page is readable and every lease has an owner. Raises AssertionError."""
        deferred = [block for _, blocks in self.scheduler.deferred_frees for block in blocks]
        self.coordinator.check_integrity(retained=deferred)

    def finish(self) -> None:
        """Let transfers in flight end, then check that everything was given back. Raises AssertionError."""
        assert self.num_unfinished == 0
        for _ in range(MAX_IDLE_STEPS):
            if not (self.scheduler.has_requests() or self.core.batch_queue):
                break
            self.step()
        if not self._has_hisparse:
            return
        self.check_integrity()
        coordinator = self.coordinator
        assert not self.scheduler.deferred_frees, "vLLM's deferred frees are left"
        assert not len(coordinator.ledger), "transfers in flight are left"
        assert not coordinator.records, "records of requests that have ended"
        assert not coordinator.regions.leased, "leased hot regions are left"
        for name, pool in (("device", coordinator.pool), ("host", coordinator.host_pool)):
            leased = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            assert leased == 0, f"{leased} {name} blocks are still leased"
        rows = self.rows
        assert rows["overflow"] == 0 and rows["unreadable"] == 0, rows


class LateCopies:
    """Page copies made as late as the contract of `CopyQueue` allows, and their end noticed later still.

    A copy is made when its blocks are about to be used again (`wait`) or `delay` acknowledgements after it
    was submitted. One that the scheduler relies on too early, or a block reused without waiting, changes
    outputs.
    """

    def __init__(self, delay: int = 3) -> None:
        self.delay = delay
        self.num_waited = 0  # transfers that a later step had to wait for
        self._age: dict[int, int] = {}  # transfer -> acknowledgements since it was submitted
        self._copies: dict[int, Callable[[], None]] = {}  # not made yet, in order

    def submit(self, transfer_id: int, copy: Callable[[], None]) -> None:
        """Keep the copies for later."""
        self._age[transfer_id] = 0
        self._copies[transfer_id] = copy

    def wait(self, transfer_ids: tuple[int, ...]) -> None:
        """Make everything up to the latest of these transfers."""
        self.num_waited += len(transfer_ids)
        self._make(max(transfer_ids, default=-1))

    def take_completed(self) -> list[int]:
        """Transfers submitted `delay` calls ago."""
        self._age = {transfer_id: age + 1 for transfer_id, age in self._age.items()}
        ended = [transfer_id for transfer_id, age in self._age.items() if age > self.delay]
        for transfer_id in ended:
            del self._age[transfer_id]
        self._make(max(ended, default=-1))
        return ended

    def _make(self, last: int) -> None:
        for transfer_id in [t for t in self._copies if t <= last]:
            self._copies.pop(transfer_id)()


def total_blocks(prompts: Sequence[Prompt], layout: Any) -> int:
    """Device blocks that hold all requests at once, without sharing."""
    lengths = [len(prompt.token_ids) + prompt.num_tokens for prompt in prompts]
    pages = sum(-(-length // layout.page_tokens) for length in lengths)
    keys = sum(-(-length // (layout.page_tokens * layout.indexer_pages)) for length in lengths)
    return layout.num_parts * pages + keys


def _external(request_id: str) -> str:
    """vLLM appends a random suffix to request ids."""
    return request_id.rsplit("-", 1)[0]


def leaves(connector: Any) -> Iterator[Any]:
    """The connectors below a MultiConnector, however nested, or the connector itself."""
    for child in getattr(connector, "_connectors", ()):
        yield from leaves(child)
    if not hasattr(connector, "_connectors"):
        yield connector


def _find(connector: Any) -> HiSparseConnector:
    from vllm_hisparse.connector import HiSparseConnector

    (found,) = (leaf for leaf in leaves(connector) if isinstance(leaf, HiSparseConnector))
    return found
