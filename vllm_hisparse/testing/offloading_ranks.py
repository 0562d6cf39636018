"""The workers of an OffloadingConnector beside `ranks.Rank`: vLLM's own, with a naive model of memory below.

Its chunks hold what indexer blocks held when a copy touched them, so a store that reads a block too late, or
a load that is relied on too early, is seen by the rank's next forward.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from .ranks import Content, Rank

__all__ = ["OffloadingRanks"]


@dataclass
class _Job:
    job_id: int
    is_store: bool
    pairs: list[tuple[int, int]]  # (device block, chunk)
    contents: list[Content] | None  # if the source has been read


class _Chunks(OffloadingWorker):
    """Host memory of one rank. Copies end in order, when `complete` or `wait` says so."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._chunks: dict[int, Content] = {}
        self._jobs: deque[_Job] = deque()
        self._ended: list[int] = []
        self.num_loads = 0

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._submit(job_id, True, zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        self.num_loads += 1
        self._submit(
            job_id, False, zip(dst_spec.block_ids.tolist(), src_spec.block_ids.tolist(), strict=True)
        )
        return True

    def wait(self, job_ids: set[int]) -> None:
        while any(job.job_id in job_ids for job in self._jobs):
            self.complete(1)

    def complete(self, num_jobs: int) -> None:
        """The oldest jobs end."""
        for _ in range(min(num_jobs, len(self._jobs))):
            job = self._jobs.popleft()
            self._write(job, self._read(job) if job.contents is None else job.contents)
            self._ended.append(job.job_id)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return [TransferResult(job_id, success=True, transfer_size=1, transfer_time=1.0) for job_id in ended]

    def _submit(self, job_id: int, is_store: bool, pairs: Any) -> None:
        job = _Job(job_id, is_store, list(pairs), None)
        if self._rank.timing != "late":
            job.contents = self._read(job)
        if self._rank.timing == "early":
            assert job.contents is not None
            self._write(job, job.contents)
        self._jobs.append(job)

    def _read(self, job: _Job) -> list[Content]:
        nothing = Content("nothing")
        if job.is_store:
            return [self._rank.device.get(block, nothing) for block, _ in job.pairs]
        return [self._chunks[chunk] for _, chunk in job.pairs]

    def _write(self, job: _Job, contents: list[Content]) -> None:
        for (block, chunk), content in zip(job.pairs, contents, strict=True):
            if job.is_store:
                self._chunks[chunk] = content
            else:
                self._rank.device[block] = content


class OffloadingRanks:
    """All ranks' workers. Each step calls `begin`, `load` and `end` in this order for every rank."""

    def __init__(self, ranks: Sequence[Rank], scheduler: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        self._scheduler = scheduler  # an OffloadingConnectorScheduler
        self.num_refused = 0  # stores that found no room, since start
        self._prepare = scheduler.manager.prepare_store
        scheduler.manager.prepare_store = self._prepare_store
        self._chunks = [_Chunks(rank) for rank in ranks]
        self._workers = []
        for chunks in self._chunks:
            worker = OffloadingConnectorWorker(
                SimpleNamespace(replicated_layout=False), vllm_config, kv_cache_config
            )
            worker.worker = chunks
            self._workers.append(worker)
        self._received: Counter[str] = Counter()  # requests whose loads have ended on so many ranks

    @property
    def num_loads(self) -> int:
        """Loads since start, on all ranks together."""
        return sum(chunks.num_loads for chunks in self._chunks)

    def _prepare_store(self, *args: Any) -> Any:
        prepared = self._prepare(*args)
        self.num_refused += prepared is None
        return prepared

    def check_idle(self) -> None:
        """Once all requests and transfers have ended: nothing is held. Raises AssertionError."""
        scheduler = self._scheduler
        held = (scheduler._jobs, scheduler._req_status, scheduler._block_id_to_pending_jobs)
        assert not any(held), held
        assert not scheduler._chunks_being_loaded

    def begin(self, number: int, meta: Any) -> None:
        """Before HiSparse's message: stores whose blocks others have got are made."""
        self._workers[number].handle_preemptions(meta)

    def load(self, number: int, meta: Any) -> None:
        """After HiSparse's message, before the forward."""
        self._workers[number].start_kv_transfers(meta)

    def end(self, number: int, meta: Any, num_completed: int) -> Any:
        """After the forward. Returns the rank's metadata for the scheduler."""
        worker = self._workers[number]
        worker.prepare_store_kv(meta)
        self._chunks[number].complete(num_completed)
        self._received.update(worker.get_finished(set())[1])
        return worker.build_connector_worker_meta()

    def take_received(self) -> set[str]:
        """Requests whose loads have ended on every rank."""
        received = {r for r, count in self._received.items() if count == len(self._workers)}
        for request_id in received:
            del self._received[request_id]
        return received
