"""The reading side on one rank: a job's pages, a few at a time, from a producer to where they land.

Pages that land on the device, pages that go from host pool to host pool, and all indexer keys are read at
once. The others pass through the job's staging places: read there, copied to the host by the page copy that
spills use, and only then overwritten by the next. Nothing else is ever read into, so a job that has ended has
nothing in flight. A read is not ordered by any stream: it starts when all is done that the device had been
given before the job came, for until then steps and copies in flight may write to blocks that changed hands.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from vllm_hisparse.messages import Copy
from vllm_hisparse.worker.copies import CopyQueue

from .addresses import Ranges
from .deadlines import TooLate
from .links import Agent, Link, Links, ReadError
from .marks import has_mark
from .messages import ImportJob, PageImport, PeerMessage

__all__ = ["Reader", "ReaderCounters"]

logger = init_logger("vllm.vllm_hisparse")


@dataclass
class ReaderCounters:
    """Since start."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    pages: int = 0
    reads: int = 0  # groups of pages


@dataclass(eq=False)
class _Work:
    """A job on its way."""

    job: ImportJob
    moved: float  # time.monotonic() at which it last got on
    may_write: Callable[[], bool]  # whether nobody uses the job's memory any more
    since: float  # time.monotonic() at which the request came to this engine
    link: Link | None = None
    ranges: Ranges | None = None  # what is to be read at once; None: it is being read or has been
    to_stage: deque[PageImport] = field(default_factory=deque)  # pages that have yet to pass through
    staged: list[PageImport] = field(default_factory=list)  # pages in the staging places, in order
    handles: list[Any] = field(default_factory=list)  # reads that may still write
    mark_row: int = -1  # of the agent's, that the producer's marks are read into
    is_copying: bool = False  # the staging places are being copied to the host
    is_cancelled: bool = False
    failure: str = ""


class Reader:
    """Jobs of one rank. Called once a step, on the thread that runs forwards."""

    def __init__(
        self,
        agent: Agent,
        links: Links,
        to_host: Callable[[tuple[Copy, ...]], None],
        fence: Callable[[], Callable[[], bool]],
        copies: CopyQueue,
        *,
        writes_host: bool,
        timeout_s: float,
    ) -> None:
        """`to_host` enqueues page copies to the host, on the stream that `copies` runs them on. `fence` makes
        a question: whether all that the device was given until then is done.

        `writes_host`: this rank writes the host pool; of the ranks that share one, one does.
        `timeout_s`: longest time without progress.
        """
        self._agent = agent
        self._links = links
        self._to_host = to_host
        self._writes_host = writes_host
        self._fence = fence
        self._copies = copies
        self._timeout_s = timeout_s
        self._work: dict[str, _Work] = {}
        self._copying: dict[int, _Work] = {}
        self._num_copies = 0
        self.counters = ReaderCounters()

    def __len__(self) -> int:
        return len(self._work)

    def accept(self, message: PeerMessage) -> None:
        """New jobs, and jobs whose requests have ended."""
        for job in message.jobs:
            now = time.monotonic()
            self._work[job.request_id] = _Work(job, now, self._fence(), now - job.age_s)
        for request_id in message.cancelled:
            if (work := self._work.get(request_id)) is not None:
                work.is_cancelled = True
        for peer, requests in message.heartbeats:
            self._links.heartbeat(peer, requests)

    def poll(self) -> tuple[set[str], set[str]]:
        """Get on with every job. Returns (requests whose jobs have ended, of these the failed ones).

        A failed or cancelled job ends once nothing is being written for it.
        """
        for transfer_id in self._copies.take_completed():
            self._copying.pop(transfer_id).is_copying = False
        ended, failed = set(), set()
        for request_id, work in list(self._work.items()):
            try:
                is_over = self._advance(work)
            except Exception as error:
                work.failure = work.failure or str(error) or type(error).__name__
                if isinstance(error, ReadError) and work.link is not None:
                    work.link.is_broken = True
                is_over = False
            if not is_over and not (work.failure and self._is_quiet(work)):
                continue
            del self._work[request_id]
            self._end(work)
            if work.job.keys:
                ended.add(request_id)
                if work.failure:
                    failed.add(request_id)
        return ended, failed

    # ---- one job

    def _advance(self, work: _Work) -> bool:
        """Whether the job has ended well or was cancelled. Raises whatever makes it fail."""
        if work.failure or work.is_cancelled:
            return not work.failure and self._is_quiet(work)
        if work.link is None:
            work.link = self._links.get(work.job.peer)
            if work.link is None:
                return False
            self._plan(work, work.link)
        if work.handles and not self._has_read(work, work.link):
            return False
        if work.is_copying:
            return False
        if not work.may_write():
            return False
        if work.staged:
            self.counters.pages += len(work.staged)
            work.staged = []
        return not self._read_more(work, work.link) and self._were_lent(work, work.link)

    def _plan(self, work: _Work, link: Link) -> None:
        """Sort the job's pages: what is read at once, and what passes through the staging places."""
        job = work.job
        work.ranges = Ranges()
        for key_page, block in job.keys:
            link.book.add_keys(work.ranges, job, key_page, block)
        for page in job.pages:
            if page.device_blocks or (self._writes_host and link.book.is_on_host(job, page.page)):
                link.book.add_page(work.ranges, job, page, page.device_blocks)
                self.counters.pages += 1
            elif self._writes_host:
                work.to_stage.append(page)

    def _read_more(self, work: _Work, link: Link) -> bool:
        """Start the next read; False if there is nothing left to read."""
        ranges, work.ranges = work.ranges or Ranges(), None
        for place in work.job.staging[: len(work.to_stage)]:
            page = work.to_stage.popleft()
            link.book.add_page(ranges, work.job, page, place)
            work.staged.append(page)
        if not ranges.pairs:
            return False
        self._check_kept(work, link)
        work.moved = time.monotonic()
        work.handles = self._agent.read(link, ranges)
        self.counters.reads += 1
        return True

    def _were_lent(self, work: _Work, link: Link) -> bool:
        """Whether the producer's mark says that pages were there while they were read. False: not known yet.

        Raises TooLate if they may not have been.
        """
        if not work.job.keys or not link.book.has_marks:
            return True
        agent, request = self._agent, work.job.remote_request_id
        if work.mark_row >= 0:
            if not has_mark(agent.marks[work.mark_row], request):
                raise TooLate("the producer does not lend the pages any more")
            return True
        if agent.free_marks:
            work.mark_row = agent.free_marks.pop()
            ranges = Ranges()
            link.book.add_mark(ranges, request, agent.marks[work.mark_row].data_ptr())
            work.moved = time.monotonic()
            work.handles = agent.read(link, ranges)
        return False

    def _has_read(self, work: _Work, link: Link) -> bool:
        """Whether the read that was started is over; then what it has staged is being copied."""
        now = time.monotonic()
        states = {self._agent.state(handle) for handle in work.handles}
        if "ERR" in states:
            raise ReadError("NIXL reports that the transfer has failed")
        if states != {"DONE"}:
            if now - work.moved > self._timeout_s:
                raise ReadError(f"no progress for {self._timeout_s:g} s")
            return False
        if not self._is_quiet(work):
            return False
        self._check_kept(work, link)
        if work.staged:
            self._copy(work)
        return True

    def _check_kept(self, work: _Work, link: Link) -> None:
        """Raises TooLate once a producer without marks may have given the pages to others."""
        if link.book.has_marks:
            return
        late = time.monotonic() - self._links.kept_until(link, work.job, work.since)
        if late >= 0:
            raise TooLate(f"the producer's lease of the pages may have ended {late:.1f} s ago")

    def _copy(self, work: _Work) -> None:
        places = zip(work.job.staging, work.staged, strict=False)
        copies = tuple(Copy(place, page.host_block) for place, page in places)
        transfer_id, self._num_copies = self._num_copies, self._num_copies + 1
        self._copying[transfer_id] = work
        work.is_copying = True
        self._copies.submit(transfer_id, lambda: self._to_host(copies))
        for done in self._copies.take_completed():
            self._copying.pop(done).is_copying = False

    def _is_quiet(self, work: _Work) -> bool:
        """Whether nothing is being written for the job any more; reads in flight are cancelled."""
        work.handles = [handle for handle in work.handles if not self._agent.release(handle)]
        return not work.handles and not work.is_copying

    def _end(self, work: _Work) -> None:
        job, counters = work.job, self.counters
        if work.mark_row >= 0:
            self._agent.free_marks.append(work.mark_row)
        if work.link is not None:
            self._links.give_back(work.link, job.remote_request_id)
        if work.failure:
            counters.failed += 1
            logger.warning(
                "HiSparse: importing %s from %s failed: %s", job.request_id, job.peer.host, work.failure
            )
        elif work.is_cancelled:
            counters.cancelled += 1
        elif job.keys:
            counters.completed += 1

    def close(self) -> None:
        """The engine ends."""
        self._links.close()
        self._agent.close()
