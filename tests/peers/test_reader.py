"""Pages read with real NIXL agents: every byte where it belongs, and no other touched."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.peers.producer import COMPATIBILITY, Producer, block_lists, make_layout, producer
from tests.servers import free_port
from vllm_hisparse.peers.addresses import ABSENT
from vllm_hisparse.peers.deadlines import renewed_s
from vllm_hisparse.peers.links import Agent, Links, remote_ranks
from vllm_hisparse.peers.messages import ImportJob, PageImport, PeerMessage
from vllm_hisparse.peers.reader import Reader
from vllm_hisparse.peers.wire import host_region
from vllm_hisparse.planning.layout import Layout
from vllm_hisparse.runtime.memory import LayerTable, Memory
from vllm_hisparse.runtime.runtime import HiSparseRuntime
from vllm_hisparse.worker.copies import InlineCopies

pytest.importorskip("nixl")

LAYOUTS = [((1, 1), 1), ((3, 1), 2), ((1, 3, 2), 3)]
LIMIT_S = 60


pytestmark = pytest.mark.usefixtures("cpu_library")


class Consumer:
    """One rank's pools and its reader."""

    def __init__(
        self,
        layout: Layout,
        timeout_s: float = LIMIT_S,
        lease_s: int = LIMIT_S,
        writes_host: bool = True,
    ) -> None:
        self.layout = layout
        self.memory = Memory(layout, torch.device("cpu"))
        self.memory.host_pool = torch.zeros_like(self.memory.host_pool)
        self.memory.layers = LayerTable(layout, torch.device("cpu"))
        runtime = object.__new__(HiSparseRuntime)  # of which page copies need just this
        runtime.layout, runtime.memory, runtime.device = layout, self.memory, torch.device("cpu")
        runtime.num_spilled_pages = 0
        self.copies = InlineCopies()
        self.agent = Agent(self.memory)
        self.links = Links(self.agent, layout, 0, 1, COMPATIBILITY, lease_s)
        self.reader = Reader(
            self.agent,
            self.links,
            runtime.write_imported,
            self.copies.fence,
            self.copies,
            writes_host=writes_host,
            timeout_s=timeout_s,
        )

    def run(self, *jobs: ImportJob) -> tuple[set[str], set[str]]:
        """All jobs to their ends."""
        self.reader.accept(PeerMessage(jobs=jobs))
        return self.finish()

    def finish(self) -> tuple[set[str], set[str]]:
        """What is under way to its end."""
        ended: set[str] = set()
        failed: set[str] = set()
        deadline = time.monotonic() + LIMIT_S
        while len(self.reader) and time.monotonic() < deadline:
            one, other = self.reader.poll()
            ended |= one
            failed |= other
        assert not len(self.reader)
        return ended, failed


MakeConsumer = Callable[..., Consumer]


@pytest.fixture
def make_consumer() -> Iterator[MakeConsumer]:
    made: list[Consumer] = []

    def make(*args: Any, **kwargs: Any) -> Consumer:
        made.append(Consumer(*args, **kwargs))
        return made[-1]

    yield make
    for consumer in made:
        consumer.reader.close()


def job(found: Producer, layout: Layout, to_host: bool, held_on_host: bool, num_pages: int = 9) -> ImportJob:
    """Pages 2 to `num_pages` and keys from page 1 on, in scattered blocks; the last page lands on the device
    in any case.
    """
    scattered = [(p * 7 + 3) % 37 for p in range(num_pages)]
    on_host = [(p * 5 + 1) % 41 if held_on_host else ABSENT for p in range(num_pages)]
    parts = range(layout.num_parts)
    pages = []
    for page in range(2, num_pages):
        if to_host and page < num_pages - 1:
            pages.append(PageImport(page, (), 40 - page))
        else:
            pages.append(PageImport(page, tuple(1 + 10 * part + page for part in parts), -1))
    return ImportJob(
        "r",
        found.peer,
        "there",
        block_lists(found, scattered, on_host),
        tuple(pages),
        tuple((page, 40 + page) for page in range(1, num_pages)),
        tuple(tuple(50 + 3 * part + place for part in parts) for place in range(3)) if to_host else (),
    )


def expected(found: Producer, layout: Layout, work: ImportJob) -> tuple[torch.Tensor, torch.Tensor]:
    """Both pools after the import, by plain slices; staging places are left as they were."""
    memory = Memory(layout, torch.device("cpu"))
    device, host = torch.zeros_like(memory.device_pool), torch.zeros_like(memory.host_pool)
    for key_page, key_block in work.keys:
        for i, name in enumerate(layout.indexer_layers):
            size = layout.geometry.shape.indexer_page_bytes
            keys = found.rows(name, work.remote_blocks[0][key_page], layout.indexer_offset[i], size)
            start = key_block * layout.indexer_stride_bytes + layout.indexer_offset[i]
            device[start : start + keys.numel()] = keys
    for page in work.pages:
        for i, name in enumerate(layout.layers):
            rows = source_rows(found, layout, work, page.page, i, name)
            if page.device_blocks:
                block = page.device_blocks[layout.layer_part[i]]
                start = block * layout.block_stride_bytes + layout.layer_offset[i]
                device[start : start + layout.page_bytes] = rows.reshape(-1)
            else:
                for row in range(layout.page_tokens):
                    token = page.host_block * layout.page_tokens + row
                    start = layout.host_offset[i] + token * layout.host_row_stride[i]
                    host[start : start + layout.row_bytes] = rows[row]
    return device, host


def source_rows(
    found: Producer, layout: Layout, work: ImportJob, page: int, layer: int, name: str
) -> torch.Tensor:
    """Rows [page_tokens, row bytes] of a layer's page, wherever the producer has them."""
    on_host = work.remote_blocks[-1][page] if len(work.remote_blocks) > 2 else ABSENT
    if on_host == ABSENT:
        at = layout.layer_offset[layer]
        rows = found.rows(name, work.remote_blocks[1][page], at, layout.page_bytes)
        return rows.reshape(layout.page_tokens, -1)
    group = layout.layer_group[layer]
    whole = found.rows(host_region(group), on_host).reshape(layout.page_tokens, -1)
    start = layout.host_offset[layer] - layout.group_host_offset[group]
    return whole[:, start : start + layout.row_bytes]


def clear_staging(layout: Layout, work: ImportJob, pool: torch.Tensor) -> torch.Tensor:
    result = pool.clone()
    for place in work.staging:
        for block in place:
            start = block * layout.block_stride_bytes
            result[start : start + layout.block_stride_bytes] = 0
    return result


@pytest.mark.parametrize(("groups", "num_parts"), LAYOUTS)
@pytest.mark.parametrize("to_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("source", ["plain", "hisparse", "hisparse-host"])
def test_every_byte(
    make_consumer: MakeConsumer, source: str, to_host: bool, groups: tuple[int, ...], num_parts: int
) -> None:
    layout = make_layout(groups, num_parts)
    with producer(layout, source != "plain") as found:
        consumer = make_consumer(layout)
        work = job(found, layout, to_host, source == "hisparse-host")
        assert consumer.run(work) == ({"r"}, set())
        device, host = expected(found, layout, work)
        assert torch.equal(consumer.memory.host_pool, host)
        assert torch.equal(clear_staging(layout, work, consumer.memory.device_pool), device)
        assert found.hear(1) == ["there:1"]
        staged = to_host and source != "hisparse-host"
        assert consumer.reader.counters.reads == (2 if staged else 1)  # 6 pages, 3 at a time


@pytest.mark.parametrize("source", ["plain", "hisparse-host"])
def test_one_of_the_ranks_that_share_a_host_pool_writes_it(make_consumer: MakeConsumer, source: str) -> None:
    layout = make_layout((2, 1), 1)
    with producer(layout, source != "plain") as found:
        consumer = make_consumer(layout, writes_host=False)
        work = job(found, layout, True, source != "plain")
        assert consumer.run(work) == ({"r"}, set())
        device, _ = expected(found, layout, work)
        assert not consumer.memory.host_pool.any()
        assert torch.equal(consumer.memory.device_pool, device)


def test_nothing_is_read_before_the_device_is_done(make_consumer: MakeConsumer) -> None:
    """With what it was given before the job: it may still write to blocks that have changed hands."""
    layout = make_layout((2, 1), 1)
    with producer(layout, False) as found:
        consumer = make_consumer(layout)
        is_done = False
        consumer.reader._fence = lambda: lambda: is_done
        consumer.reader.accept(PeerMessage(jobs=(job(found, layout, True, False),)))
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            consumer.reader.poll()
        assert consumer.reader.counters.reads == 0
        is_done = True
        assert consumer.finish() == ({"r"}, set())


def test_many_jobs_over_one_link(make_consumer: MakeConsumer) -> None:
    layout = make_layout((2, 1), 1)
    with producer(layout, False) as found:
        consumer = make_consumer(layout)
        first = job(found, layout, True, False)
        others = [ImportJob(f"r{i}", found.peer, f"there{i}") for i in range(3)]
        assert consumer.run(first, *others) == ({"r"}, set())
        assert sorted(found.hear(4)) == ["there0:1", "there1:1", "there2:1", "there:1"]


def test_cancelled(make_consumer: MakeConsumer) -> None:
    """The job ends with nothing in flight, and the producer is told."""
    layout = make_layout((2, 1), 1)
    with producer(layout, False) as found:
        consumer = make_consumer(layout)
        consumer.reader.accept(PeerMessage(jobs=(job(found, layout, True, False),)))
        while not consumer.reader.counters.reads:
            consumer.reader.poll()
        consumer.reader.accept(PeerMessage(cancelled=("r",)))
        assert consumer.finish() == ({"r"}, set())
        assert consumer.reader.counters.cancelled == 1
        assert found.hear(1) == ["there:1"]


def test_heartbeats(make_consumer: MakeConsumer) -> None:
    layout = make_layout((2, 1), 1)
    with producer(layout, False) as found:
        consumer = make_consumer(layout)
        consumer.run(ImportJob("r", found.peer, "there"))
        assert found.hear(1) == ["there:1"]
        consumer.reader.accept(PeerMessage(heartbeats=((found.peer, ("a", "b")),)))
        assert found.hear(1) == ["HB:a,b"]


def test_nobody_answers(make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_hisparse.peers.wire.ANSWER_MS", 50)
    layout = make_layout((2, 1), 1)
    with producer(layout, False) as found:
        work = job(found, layout, True, False)
    consumer = make_consumer(layout)
    nobody = replace(work, peer=found.peer._replace(port=free_port()))
    assert consumer.run(nobody) == ({"r"}, {"r"})


@pytest.mark.parametrize(
    "damage",
    [
        {"remote_blocks": ((0,), (0,))},
        {"remote_blocks": ((900,) * 9, (900,) * 9)},
        {"remote_blocks": ((-1,) * 9, (-1,) * 9)},
    ],
    ids=["too-few", "beyond-the-pool", "absent"],
)
def test_blocks_that_the_producer_does_not_have(make_consumer: MakeConsumer, damage: dict[str, Any]) -> None:
    layout = make_layout((2, 1), 1)
    with producer(layout, False) as found:
        consumer = make_consumer(layout)
        work = replace(job(found, layout, True, False), **damage)
        assert consumer.run(work) == ({"r"}, {"r"})
        assert not consumer.memory.host_pool.any()


def test_another_model(make_consumer: MakeConsumer) -> None:
    layout = make_layout((2, 1), 1)
    with producer(layout, False, "something else") as found:
        consumer = make_consumer(layout)
        assert consumer.run(job(found, layout, True, False)) == ({"r"}, {"r"})


def test_other_layers(make_consumer: MakeConsumer) -> None:
    with producer(make_layout((2, 1), 1), False) as found:
        layout = make_layout((2, 2), 1)
        consumer = make_consumer(layout)
        assert consumer.run(job(found, layout, True, False)) == ({"r"}, {"r"})


def test_a_producer_that_has_come_back_as_another(make_consumer: MakeConsumer) -> None:
    layout = make_layout((2, 1), 1)
    with producer(layout, False) as found:
        consumer = make_consumer(layout)
        work = job(found, layout, True, False)
        stale = replace(work, peer=found.peer._replace(engine_id="the one before"))
        assert consumer.run(stale) == ({"r"}, {"r"})
        assert consumer.run(work) == ({"r"}, set())


@pytest.mark.parametrize("to_host", [False, True], ids=["device", "host"])
def test_a_lease_that_has_ended(make_consumer: MakeConsumer, to_host: bool) -> None:
    """The producer has given the pages to others by then: they do not count."""
    layout = make_layout((3,), 2)
    with producer(layout, True) as found:
        consumer = make_consumer(layout)
        work = job(found, layout, to_host, False)
        assert consumer.run(work) == ({"r"}, set())
        assert found.marks is not None
        found.marks.update([], ["there"])
        assert consumer.run(work) == ({"r"}, {"r"})
        assert consumer.reader.counters.failed == 1


def start_reading(consumer: Consumer, work: ImportJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader is in the middle of a job, until the patch is undone."""
    monkeypatch.setattr(consumer.agent, "state", lambda handle: "PROC")
    consumer.reader.accept(PeerMessage(jobs=(work,)))
    while not consumer.reader.counters.reads:
        consumer.reader.poll()


def test_a_lease_that_ends_while_pages_are_read(
    make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_layout((3,), 2)
    with producer(layout, True) as found:
        consumer = make_consumer(layout)
        start_reading(consumer, job(found, layout, False, False), monkeypatch)
        assert found.marks is not None
        found.marks.update([], ["there"])
        monkeypatch.undo()
        assert consumer.finish() == ({"r"}, {"r"})


def test_more_jobs_than_rows_for_marks(make_consumer: MakeConsumer) -> None:
    layout = make_layout((2, 1), 1)
    with producer(layout, True) as found:
        consumer = make_consumer(layout)
        del consumer.agent.free_marks[1:]
        jobs = [replace(job(found, layout, False, False), request_id=f"r{i}") for i in range(4)]
        assert consumer.run(*jobs) == ({"r0", "r1", "r2", "r3"}, set())
        assert len(consumer.agent.free_marks) == 1


def test_a_plain_producers_lease_that_may_have_ended(make_consumer: MakeConsumer) -> None:
    """Two thirds of one from the request's arrival are left, waiting for blocks included."""
    layout = make_layout((2, 1), 1)
    with producer(layout, False) as found:
        consumer = make_consumer(layout)
        work = job(found, layout, True, False)
        assert consumer.run(replace(work, age_s=LIMIT_S * 2 / 3)) == ({"r"}, {"r"})
        assert not consumer.reader.counters.reads
        assert consumer.run(replace(work, age_s=1.0)) == ({"r"}, set())


def test_a_plain_producers_lease_that_ends_while_pages_are_read(
    make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_layout((2, 1), 1)
    with producer(layout, False) as found:
        consumer = make_consumer(layout)
        start_reading(consumer, job(found, layout, False, False), monkeypatch)
        monkeypatch.undo()
        monkeypatch.setattr(consumer.links, "kept_until", lambda *_: time.monotonic() - 1)
        assert consumer.finish() == ({"r"}, {"r"})


def test_heartbeats_keep_a_plain_producers_lease(make_consumer: MakeConsumer) -> None:
    layout = make_layout((2, 1), 1)
    with producer(layout, False) as found:
        consumer = make_consumer(layout)
        consumer.run(ImportJob("first", found.peer, "first"))
        consumer.reader.accept(PeerMessage(heartbeats=((found.peer, ("there",)),)))
        assert found.hear(2) == ["first:1", "HB:there"]
        link = consumer.links.get(found.peer)
        assert link is not None
        work = job(found, layout, True, False)
        now = time.monotonic()
        in_time = consumer.links.kept_until(link, work, now - 10)
        assert now < in_time < now + LIMIT_S
        too_late = consumer.links.kept_until(link, work, now - LIMIT_S)
        assert too_late == now - LIMIT_S + renewed_s(LIMIT_S)


@pytest.mark.parametrize(
    ("rank", "num_ranks", "num_remote", "wanted"),
    [(0, 1, 1, ([0], 1)), (3, 4, 2, ([1], 2)), (1, 2, 4, ([2, 3], 1)), (0, 1, 4, ([0, 1, 2, 3], 1))],
)
def test_ranks(rank: int, num_ranks: int, num_remote: int, wanted: tuple[list[int], int]) -> None:
    assert remote_ranks(rank, num_ranks, num_remote) == wanted


def test_ranks_that_do_not_divide() -> None:
    with pytest.raises(RuntimeError, match="need one number to divide the other"):
        remote_ranks(0, 2, 3)
