"""KV cache events: whoever replays them knows which pages either tier holds.

vLLM's own publisher sends them over ZMQ, as it does in an engine; the consumer here asks for a replay.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

from vllm_hisparse.testing.scheduler import SchedulerRig

Page = tuple[Any, Any]  # KV group, hash
SOURCE_GROUP = 0


class Consumer:
    """Follows the replay socket of a publisher."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._next = 0
        self.device: Counter[Page] = Counter()  # blocks that hold the page
        self.host: set[Page] = set()
        self.host_tokens: dict[Page, tuple[list[int], Any]] = {}  # and the parent's hash
        self.num_removed = {"GPU": 0, "CPU": 0}
        self.num_cleared = 0

    def catch_up(self, num_batches: int) -> None:
        """Apply what was published since the last call, until `num_batches` have come from the start."""
        decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        while self._next < num_batches:
            self._socket.send_multipart((b"", self._next.to_bytes(8, "big")))
            while True:
                assert self._socket.poll(10_000), "no answer"
                _, _, number, payload = self._socket.recv_multipart()
                if not payload:
                    break
                assert int.from_bytes(number, "big") == self._next
                self._next += 1
                for event in decode(payload).events:
                    self._apply(event)

    def _apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.device.clear()
            self.host.clear()
            self.num_cleared += 1
            return
        assert isinstance(event, BlockStored | BlockRemoved)
        for page_hash in event.block_hashes:
            page = (event.group_idx, page_hash)
            if event.medium == "GPU":
                assert event.group_idx != SOURCE_GROUP
                self.device[page] += 1 if isinstance(event, BlockStored) else -1
                assert self.device[page] >= 0, "removed, but was not there"
            else:
                assert (event.medium, event.group_idx) == ("CPU", SOURCE_GROUP)
                assert (page in self.host) == isinstance(event, BlockRemoved), "stored or removed twice"
                self.host ^= {page}
        if isinstance(event, BlockRemoved):
            self.num_removed[event.medium] += len(event.block_hashes)
        elif event.medium == "CPU":
            assert event.kv_cache_spec_kind == "mla_attention"
            self.host_tokens[event.group_idx, event.block_hashes[0]] = (
                event.token_ids,
                event.parent_block_hash,
            )

    def close(self) -> None:
        self._socket.close(linger=0)


def contents(pool: Any) -> Counter[Page]:
    """Blocks of a pool by the page that a lookup finds in them."""
    hashes = [b.block_hash for b in pool.blocks if b.block_hash is not None]
    return Counter((get_group_id(h), maybe_convert_block_hash(get_block_hash(h))) for h in hashes)


class Published:
    """A rig whose events are published, and a consumer of them."""

    def __init__(self, rig: SchedulerRig, directory: Path) -> None:
        self.rig = rig
        self.consumer = Consumer(f"ipc://{directory}/replay")
        self.num_batches = 0
        publish = rig.scheduler.kv_event_publisher.publish

        def count(batch: Any) -> None:
            self.num_batches += 1
            publish(batch)

        rig.scheduler.kv_event_publisher.publish = count

    def compare(self) -> None:
        """The consumer knows exactly what the pools hold. Events of a reset go out with the next step."""
        assert not self.rig.coordinator.pool.kv_event_queue
        self.consumer.catch_up(self.num_batches)
        coordinator = self.rig.coordinator
        assert +self.consumer.device == contents(coordinator.pool)
        assert self.consumer.host == set(contents(coordinator.host_pool))

    def run(self, *prompts: list[int], max_tokens: int = 10) -> None:
        for prompt in prompts:
            self.rig.add(f"r{len(self.rig.outputs)}", prompt, max_tokens)
        self.rig.run()
        self.compare()


@pytest.fixture
def make_published(make_rig: Any, tmp_path: Path) -> Iterator[Any]:
    """A published rig with `EngineOptions` by keyword."""
    made = []

    def make(**options: Any) -> Published:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Published(make_rig(**options, kv_events=str(directory)), directory))
        return made[-1]

    yield make
    for published in made:
        published.consumer.close()
        published.rig.scheduler.kv_event_publisher.shutdown()


@pytest.mark.parametrize("num_parts", [1, 3])
def test_replayed_events_are_what_both_tiers_hold(make_published: Any, num_parts: int) -> None:
    """Under pressure, with a host pool that evicts, after a reset, and with what comes after it."""
    published = make_published(
        num_device_blocks=25 + 16 * num_parts, num_parts=num_parts, num_host_blocks=40, low=0.1, high=0.9
    )
    consumer: Consumer = published.consumer
    published.run(list(range(60)), list(range(100, 150)))
    assert len(consumer.host) > 20
    assert consumer.num_removed["GPU"] > 0
    published.run(list(range(200, 260)), list(range(300, 350)), list(range(60)))
    assert consumer.num_removed["CPU"] > 0
    assert published.rig.reset(running=False)
    published.run([1, 2, 3])
    assert consumer.num_cleared == 2  # one a pool
    assert len(consumer.host) <= 3  # pages of what has run since
    published.run(list(range(60)), list(range(100, 150)))
    assert len(consumer.host) > 20


def test_an_event_describes_its_page(make_published: Any) -> None:
    published = make_published(num_device_blocks=61, low=0.0, high=0.9)
    published.run(list(range(24)))
    request = published.rig.add("again", range(24), max_tokens=1)
    hashes = [maybe_convert_block_hash(h) for h in request.block_hashes]
    for page, page_hash in enumerate(hashes[:5]):
        tokens, parent = published.consumer.host_tokens[SOURCE_GROUP, page_hash]
        assert tokens == list(range(4 * page, 4 * page + 4))
        assert parent == (hashes[page - 1] if page else None)


def test_a_page_in_two_blocks_is_stored_once_and_removed_once(make_published: Any) -> None:
    """Two requests that start together on one prompt each write their own copy to the host."""
    published = make_published(
        num_device_blocks=121, num_host_blocks=28, low=0.0, high=0.9, max_step_tokens=64
    )
    prompt = list(range(40))
    published.rig.add("a", prompt, max_tokens=4)
    published.rig.scheduler.kv_cache_manager.enable_caching = False  # so that b does not hit what a writes
    published.rig.add("b", prompt, max_tokens=4)
    published.rig.submit()
    published.rig.scheduler.kv_cache_manager.enable_caching = True
    published.rig.collect()
    published.run()
    blocks = contents(published.rig.coordinator.host_pool)
    assert max(blocks.values()) == 2
    for first in (100, 200, 300):  # evict one of two blocks, then the other
        published.run(list(range(first, first + 24)))
    assert published.consumer.num_removed["CPU"] > 0
    assert max(contents(published.rig.coordinator.host_pool).values()) == 1


def test_a_reset_that_fails_clears_nothing(make_published: Any) -> None:
    """The device pool is in use; the host pool alone could be reset."""
    published = make_published(num_device_blocks=121, low=0.0, high=0.9, num_ranks=1)
    published.run(list(range(40)))
    host = set(published.consumer.host)
    published.rig.add("b", range(100, 104), max_tokens=40)
    published.rig.step()
    assert not published.rig.reset(running=False)
    published.rig.run()
    published.compare()
    assert host <= published.consumer.host
    assert published.consumer.num_cleared == 0


def test_no_events_unless_they_are_asked_for(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=41, low=0.1, high=0.9)
    rig.add("a", range(60), max_tokens=10)
    rig.run()
    assert rig.coordinator.host_pool.num_published > 0
    assert rig.coordinator.pool.kv_event_queue == []
