"""The order in which ranks use a pool that one of them writes, on streams that run as late as they like.

Ranks, streams and their interleaving are modelled: nothing but `WriteTurns` and what the scheduler promises
orders them, no collective of a forward either, so a rank may be steps behind another.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from vllm_hisparse.runtime.turns import PolledWords, WriteTurns

Op = Callable[[], bool]  # what a stream does next; False: it cannot yet
NUM_BLOCKS = 4
MOST_IN_FLIGHT = 3  # steps that a rank's CPU may be ahead of the slowest rank's


@dataclass
class Message:
    """A step: host blocks to write, and which a rank's forward, or a copy back to the device, reads."""

    step: int
    wait: list[int]
    write: list[int]
    restore: list[int]
    read: list[int]
    expected: dict[int, int]  # version of each block that is read


class ModelWords:
    """Words that a rank's copy stream stores and waits for."""

    def __init__(self, values: list[int], stream: deque[Op]) -> None:
        self._values = values
        self._stream = stream

    def store(self, word: int, value: int) -> None:
        def run() -> bool:
            self._values[word] = value
            return True

        self._stream.append(run)

    def wait(self, word: int, value: int) -> None:
        self._stream.append(lambda: self._values[word] >= value)


class DeafReader(ModelWords):
    """Reads without waiting for the writer."""

    def wait(self, word: int, value: int) -> None:
        if word > 0:
            super().wait(word, value)


class DeafWriter(ModelWords):
    """Writes without waiting for the readers."""

    def wait(self, word: int, value: int) -> None:
        if word == 0:
            super().wait(word, value)


@dataclass
class Rank:
    """One rank's two streams, driven as `HiSparseWorker` and `StreamCopies` drive CUDA's."""

    turns: WriteTurns
    host: dict[int, int]  # block -> version; 0 while it is being written
    copying: deque[Op]
    computing: deque[Op] = field(default_factory=deque)
    inbox: deque[Message] = field(default_factory=deque)
    ended: set[int] = field(default_factory=set)  # transfers whose part here has ended
    num_submitted: int = 0
    num_computed: int = 0  # ops of the compute stream that have run
    num_compute_ops: int = 0

    def compute(self, op: Op) -> None:
        def run() -> bool:
            done = op()
            self.num_computed += done
            return done

        self.computing.append(run)
        self.num_compute_ops += 1

    def submit(self) -> None:
        message = self.inbox.popleft()
        for transfer in message.wait:
            self.compute(lambda t=transfer: t in self.ended)
        before = self.num_compute_ops
        self.copying.append(lambda: self.num_computed >= before)
        if message.write:
            self.turns.begin()
            self.turns.take(lambda: self._write(message))
        for block in message.restore:
            self.copying.append(lambda b=block: self._read(b, message))
        self.copying.append(lambda: not self.ended.add(message.step))
        for block in message.read:
            self.compute(lambda b=block: self._read(b, message))
        self.num_submitted += 1

    def _write(self, message: Message) -> None:
        for version in (0, message.step + 1):  # torn first
            for block in message.write:
                self.copying.append(lambda b=block, v=version: not self.host.update({b: v}))

    def _read(self, block: int, message: Message) -> bool:
        assert self.host[block] == message.expected[block], (message, block, self.host[block])
        return True


class Engine:
    """Ranks on one node, and what the scheduler knows of them."""

    def __init__(self, seed: int, num_ranks: int, words: type[ModelWords]) -> None:
        self.random = random.Random(seed)
        self.host = dict.fromkeys(range(NUM_BLOCKS), 0)
        values = [0] * (1 + num_ranks)
        self.ranks = []
        for rank in range(num_ranks):
            copying: deque[Op] = deque()
            turns = WriteTurns(rank, num_ranks, words(values, copying))
            self.ranks.append(Rank(turns, self.host, copying))
        self.versions = dict.fromkeys(range(NUM_BLOCKS), 0)  # step + 1 of the latest write
        self.num_planned = 0

    def run(self, num_steps: int) -> None:
        while self.num_planned < num_steps or self._is_busy():
            moves = [self.plan] if self.num_planned < num_steps and self._may_plan() else []
            for rank in self.ranks:
                moves += [rank.submit] if rank.inbox else []
                moves += [lambda s=s: self._advance(s) for s in (rank.copying, rank.computing) if s]
            self.random.shuffle(moves)
            assert any(move() is not False for move in moves), "ranks wait for each other for ever"

    def _is_busy(self) -> bool:
        return any(r.inbox or r.copying or r.computing for r in self.ranks)

    def _may_plan(self) -> bool:
        return self.num_planned - min(r.num_submitted for r in self.ranks) < MOST_IN_FLIGHT

    def _advance(self, stream: deque[Op]) -> bool:
        moved = stream[0]()
        if moved:
            stream.popleft()
        return moved

    def plan(self) -> None:
        """What a scheduler may ask for: reads of what is written, or enqueued and waited for; writes to what
        no copy is on its way to and this step does not read.
        """
        step = self.num_planned
        acknowledged = [
            min(r.num_submitted for r in self.ranks) >= version
            and all(version - 1 in r.ended for r in self.ranks)
            for version in self.versions.values()
        ]
        enqueued = [min(r.num_submitted for r in self.ranks) >= v > 0 for v in self.versions.values()]
        readable = [b for b in self.versions if acknowledged[b] and self.versions[b]]
        landing = [b for b in self.versions if enqueued[b] and not acknowledged[b]]
        restore = [b for b in readable if self.random.random() < 0.3]
        read = [b for b in readable if self.random.random() < 0.5]
        late = [b for b in landing if self.random.random() < 0.7]
        kept = {*restore, *read, *late}
        free = [b for b, v in self.versions.items() if (acknowledged[b] or v == 0) and b not in kept]
        write = [b for b in free if self.random.random() < 0.6]
        expected = dict(self.versions)
        wait = sorted({self.versions[b] - 1 for b in late})
        message = Message(step, wait, write, restore, read + late, expected)
        for block in write:
            self.versions[block] = step + 1
        for rank in self.ranks:
            rank.inbox.append(message)
        self.num_planned += 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_read_sees_what_was_written_last(num_ranks: int) -> None:
    for seed in range(60):
        Engine(seed, num_ranks, ModelWords).run(25)


@pytest.mark.parametrize("words", [DeafReader, DeafWriter])
def test_without_a_wait_reads_are_wrong(words: type[ModelWords]) -> None:
    wrong = [seed for seed in range(60) if not _runs(Engine(seed, 2, words))]
    assert len(wrong) > 5


def _runs(engine: Engine) -> bool:
    try:
        engine.run(25)
    except AssertionError:
        return False
    return True


def test_words_on_the_cpu() -> None:
    """Two threads: neither passes before the other is where it has to be."""
    memory = memoryview(bytearray(WriteTurns.num_bytes(2)))
    events: list[str] = []
    writing, go = threading.Event(), threading.Event()

    def write() -> None:
        events.append("write")
        writing.set()
        go.wait(10)
        events.append("written")

    writer = WriteTurns(0, 2, PolledWords(memory))
    reader = WriteTurns(1, 2, PolledWords(memory))

    def write_twice() -> None:
        for _ in range(2):
            writer.begin()
            writer.take(write)

    thread = threading.Thread(target=write_twice)
    thread.start()
    events.append("begin")  # the writer waits for this rank's part
    releaser = threading.Thread(target=lambda: writing.wait(10) and go.set())
    releaser.start()
    reader.begin()
    reader.take(lambda: events.append("never"))
    events.append("read")
    reader.begin()
    reader.take(lambda: events.append("never"))
    thread.join(10)
    releaser.join(10)
    assert events[:4] == ["begin", "write", "written", "read"]
    assert events.count("written") == 2 and "never" not in events


def test_nobody_waits_for_a_copy_that_failed() -> None:
    memory = memoryview(bytearray(WriteTurns.num_bytes(2)))
    writer = WriteTurns(0, 2, PolledWords(memory))
    reader = WriteTurns(1, 2, PolledWords(memory))
    errors = []

    def fail() -> None:
        raise RuntimeError("no memory")

    def write() -> None:
        writer.begin()
        try:
            writer.take(fail)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=write)
    thread.start()
    reader.begin()
    reader.take(fail)
    thread.join(10)
    assert errors == ["no memory"]


def test_one_rank_writes_at_once() -> None:
    done = []
    turns = WriteTurns()
    turns.begin()
    turns.take(lambda: done.append(1))
    assert done == [1]
