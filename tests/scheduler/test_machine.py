"""A state machine over vLLM's scheduler: whatever clients and copy streams do, every token stays readable.

The rig checks after each call; here are the moves. `tests/scheduler/ -m long` makes 100,000 steps of it.
"""

import logging
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.request import RequestStatus

from vllm_hisparse.testing.borrowing import transfer_params
from vllm_hisparse.testing.engine_config import EngineOptions, make_vllm_config, minimum_device_blocks
from vllm_hisparse.testing.logs import only_errors
from vllm_hisparse.testing.model_runner import VOCABULARY
from vllm_hisparse.testing.ranks import Rank
from vllm_hisparse.testing.scheduler import ALL, SchedulerRig

ENGINES: dict[str, list[Any]] = {
    "num_parts": [1, 3],
    "indexer_pages": [1, 3],
    "num_ranks": [1, 2],
    "num_drafts": [0, 0, 2],
    "drafts_by": ["ngram", "mtp"],
    "policy": ["fcfs", "priority"],
    "hot_rows": [12, 16],
    "max_hot_rows": [16, 32],
    "async_scheduling": [False, True],
    "kv_role": ["kv_both", "kv_producer"],
    "nixl_role": [None, None, None, "kv_consumer"],
    "prefix_caching": [True, True, True, False],
    "low": [0.0, 0.1, 0.3],
    "high": [0.35, 0.7],
    "eager_host_mirror": [False, True],
    "always_host": [False, False, False, True],
    "prefix_share": [0.0, 0.5],
    "max_passing": [0, 1, 16],
    "max_requests": [2, 6],
    "max_step_tokens": [12, 40],
    "max_model_len": [48, 96],
    "num_offload_chunks": [0, 0, 4, 100],
    "offload_prompt_only": [True, False],
}
SPARE_DEVICE, SPARE_HOST = [0, 2, 12, 60], [0, 3, 60]
TIMINGS = ["early", "late", "split"]
# What a run is worth nothing without: the pools run out, copies fail, reports get lost.
EVENTS = (
    "refused",
    "host_full",
    "failed",
    "silent",
    "repeated",
    "spilled",
    "restored",
    "deduplicated",
    "host_hits",
    "keys_loaded",
    "keys_refused",
    "import_device",
    "import_host",
    "import_arrived",
    "import_failed",
    "import_cancelled",
)
COUNTS = [0, 0, 1, 2, ALL]


class Machine(RuleBasedStateMachine):
    """Clients that come, go and share prefixes; copies that end late, and in another step on each rank."""

    seen: ClassVar[Counter[str]] = Counter()  # of all machines

    @initialize(
        engine=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in ENGINES.items()}),
        spare_device=st.sampled_from(SPARE_DEVICE),
        spare_host=st.sampled_from(SPARE_HOST),
        timing=st.sampled_from(TIMINGS),
        seed=st.integers(0, 99),
    )
    def start(
        self, engine: dict[str, Any], spare_device: int, spare_host: int, timing: Any, seed: int
    ) -> None:
        """Pools from the smallest that planning accepts."""
        self.directory = tempfile.TemporaryDirectory()
        path = Path(self.directory.name)
        if not engine["prefix_caching"]:
            engine = engine | {"num_offload_chunks": 0}  # refused: test_errors.py
        if engine["nixl_role"] is not None:  # an indexer block has one page then, as the plugin decides
            engine = engine | {"indexer_pages": 1, "num_offload_chunks": 0}
        asked = EngineOptions(**engine)
        num_device = minimum_device_blocks(make_vllm_config(asked, path), asked) + spare_device
        num_host = -(-asked.max_model_len // asked.page_tokens) + 2 + spare_host
        options = EngineOptions(**engine, num_device_blocks=num_device, num_host_blocks=num_host)
        self.rig = SchedulerRig(options, path, timing, seed, shares_pool=seed % 2 == 0)
        self.num_added = 0

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 80),
        own=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 40),
        priority=st.integers(0, 2),
    )
    def add(self, family: int, shared: int, own: list[int], max_tokens: int, priority: int = 0) -> None:
        longest = self.rig.options.max_model_len - 1
        prompt = ([(family * 7 + j * 3) % VOCABULARY for j in range(shared)] + own)[-longest:]
        max_tokens = min(max_tokens, longest + 1 - len(prompt))
        self.rig.add(f"r{self.num_added}", prompt, max_tokens, priority=priority)
        self.num_added += 1

    @precondition(lambda self: self.rig.borrowing is not None)
    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 95),
        max_tokens=st.integers(1, 40),
        from_host=st.sets(st.integers(0, 23), max_size=6),
    )
    def borrow(self, family: int, length: int, max_tokens: int, from_host: set[int]) -> None:
        """A prompt that another engine has computed, with some of its pages on that engine's host."""
        options = self.rig.options
        length = min(length, options.max_model_len - 1)
        num_pages = -(-length // options.page_tokens)
        on_host = [p for p in from_host if p < num_pages]
        transfer = transfer_params(length, options.page_tokens, on_host, f"p{self.num_added}")
        prompt = [(family * 7 + j * 3) % VOCABULARY for j in range(length)]
        max_tokens = min(max_tokens, options.max_model_len - length)
        self.rig.add(f"r{self.num_added}", prompt, max_tokens, transfer)
        self.num_added += 1

    @precondition(lambda self: self.rig.borrowing is not None and self.rig.borrowing.jobs)
    @rule(which=st.integers(0, 1000), failed=st.sampled_from([False, False, True]))
    def deliver(self, which: int, failed: bool) -> None:
        """A transfer ends with the next step."""
        jobs = list(self.rig.borrowing.jobs)
        self.rig.deliver(jobs[which % len(jobs)], failed)

    @rule(
        counts=st.lists(st.sampled_from(COUNTS), min_size=2, max_size=2), misses=st.sampled_from([0, 0, 50])
    )
    def step(self, counts: tuple[int, ...], misses: int) -> None:
        self.rig.num_misses = misses
        self.rig.step(*counts[: len(self.rig.ranks)])

    @rule(counts=st.lists(st.sampled_from(COUNTS), min_size=2, max_size=12), watch=st.booleans())
    def steps(self, counts: list[int], watch: bool) -> None:
        self.rig.watch_refusals = watch
        for count in counts:
            self.rig.step(*[count] * len(self.rig.ranks))
            self.seen["host_full"] += self.rig.coordinator.host_pool.get_num_free_blocks() == 0

    @rule(
        counts=st.lists(st.sampled_from(COUNTS), min_size=1, max_size=6),
        silent=st.sets(st.integers(0, 1)),
        failing=st.sets(st.integers(0, 1)),
    )
    def steps_with_faults(self, counts: list[int], silent: set[int], failing: set[int]) -> None:
        """Some ranks' reports get lost, some can enqueue no copies."""
        self._plant(silent, failing)
        self.steps(counts, watch=False)
        self._plant(set(), set())

    def _plant(self, silent: set[int], failing: set[int]) -> None:
        for rank in self.rig.ranks:
            rank.is_silent, rank.fails = rank.number in silent, rank.number in failing

    @precondition(lambda self: self.rig.scheduler.requests)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        requests = list(self.rig.scheduler.requests)
        self.rig.abort(requests[which % len(requests)])

    @precondition(lambda self: self.rig.scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.rig.preempt()

    @precondition(lambda self: self.rig.acks)
    @rule(which=st.integers(0, 1000))
    def repeat_report(self, which: int) -> None:
        self.rig.repeat_report(which)
        self.seen["repeated"] += 1

    @rule(low=st.sampled_from([0, 5, 10]), high=st.sampled_from([11, 20]))
    def move_watermarks(self, low: int, high: int) -> None:
        """As if the pool had become smaller or larger."""
        pressure = self.rig.coordinator.pressure
        pressure.low, pressure.high = low, high

    @precondition(lambda self: self._backed())
    @rule(which=st.integers(0, 1000), counts=st.lists(st.sampled_from(COUNTS), min_size=4, max_size=8))
    def calm(self, which: int, counts: list[int]) -> None:
        """All clients leave but one, whose pages are away: they come back."""
        backed = self._backed()
        for request_id in set(self.rig.scheduler.requests) - {backed[which % len(backed)]}:
            self.rig.abort(request_id)
        self.move_watermarks(0, 1)
        self.steps(counts, watch=False)

    def _backed(self) -> list[str]:
        records = self.rig.coordinator.records.values()
        return [r.request_id for r in records if r.pages.num_host_only and r.slot >= 0]

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        scheduler = self.rig.scheduler
        loading = any(r.status is RequestStatus.WAITING_FOR_REMOTE_KVS for r in scheduler.requests.values())
        loading |= any(r.is_importing for r in self.rig.coordinator.records.values())
        if not (running and (scheduler.defer_block_free or loading)):  # vLLM refuses: test_lifecycle.py
            self.rig.reset(running)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.watch_refusals = False
            self.rig.run(4000)
            self.seen["steps"] += len(self.rig.messages)
            self.seen["refused"] += self.rig.num_refused
            self.seen["silent"] += self.rig.num_lost_reports
            self.seen.update(vars(self.rig.coordinator.leases.counters))
            for side in self.rig.offloading:
                self.seen["keys_loaded"] += side.num_loads
                self.seen["keys_refused"] += side.num_refused
            imports = vars(self.rig.coordinator.imports.counters)
            self.seen.update({f"import_{event}": count for event, count in imports.items()})
            self.directory.cleanup()


def search(max_examples: int, num_rules: int) -> None:
    """Hypothesis looks for what breaks, and shrinks it."""
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_rules,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )


def walk(seed: int, num_moves: int) -> None:
    """Moves by chance: unlike Hypothesis', they are spread evenly, so that each kind of event comes up."""
    chance = random.Random(seed)
    machine = Machine()
    engine = {name: chance.choice(values) for name, values in ENGINES.items()}
    machine.start(
        engine, chance.choice(SPARE_DEVICE), chance.choice(SPARE_HOST), chance.choice(TIMINGS), seed
    )
    for _ in range(num_moves):
        move(machine, chance)
    machine.teardown()


def walks(seeds: Iterable[int]) -> None:
    for seed in seeds:
        walk(seed, num_moves=60)


def move(machine: Machine, chance: random.Random) -> None:
    which = chance.randrange(1000)
    counts = [chance.choice(COUNTS) for _ in range(chance.randint(2, 12))]
    kind = chance.choice(
        ["add"] * 6 + ["steps"] * 6 + ["faults", "abort", "preempt", "repeat", "levels", "calm"]
    )
    if machine.rig.borrowing is not None and chance.random() < 0.3:
        jobs = list(machine.rig.borrowing.jobs)
        if jobs and which % 7 == 0:
            machine.rig.abort(jobs[0])
        elif jobs and which % 2:
            machine.deliver(which, failed=which % 3 == 0)
        else:
            from_host = {chance.randrange(24) for _ in range(which % 3)}
            machine.borrow(which % 3, chance.randint(1, 95), chance.choice([1, 10]), from_host)
    if kind == "add":
        own = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 20))]
        machine.add(chance.randrange(3), chance.randint(0, 80), own, chance.choice([1, 10, 40]), which % 3)
    elif kind == "steps":
        machine.steps(counts, watch=which % 2 > 0)
    elif kind == "faults":
        silent, failing = ({n for n in range(2) if chance.random() < 0.4} for _ in range(2))
        machine.steps_with_faults(counts[:6], silent, failing)
    elif kind == "abort" and machine.rig.scheduler.requests:
        machine.abort(which)
    elif kind == "preempt" and machine.rig.scheduler.running:
        machine.preempt()
    elif kind == "repeat" and machine.rig.acks:
        machine.repeat_report(which)
    elif kind == "levels":
        machine.move_watermarks(*chance.choice([(0, 11), (5, 20), (10, 20)]))
    elif kind == "calm" and machine._backed():
        machine.calm(which, counts)
        machine.reset(running=which % 4 == 0)


@pytest.fixture
def seen() -> Iterator[Counter[str]]:
    """How often what has happened, in all machines of a test."""
    Machine.seen = Counter()
    with only_errors(logging.CRITICAL):
        yield Machine.seen


def test_machine(seen: Counter[str]) -> None:
    search(max_examples=100, num_rules=40)
    assert seen["steps"] > 1000


def test_walks(seen: Counter[str]) -> None:
    walks(range(90))
    assert seen["steps"] > 5000
    assert all(seen[event] > 10 for event in EVENTS), seen


def test_a_rank_that_does_not_wait_for_the_writer_is_seen(
    seen: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Rank.share

    def deaf(self: Rank, writer: Rank) -> None:
        share(self, writer)
        self.is_deaf = True

    monkeypatch.setattr(Rank, "share", deaf)
    with pytest.raises(AssertionError, match="page"):
        walks(range(0, 60, 2))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_machine_for_long(seen: Counter[str]) -> None:
    search(max_examples=1500, num_rules=50)
    walks(range(100, 900))
    assert seen["steps"] > 100_000
    assert all(seen[event] > 200 for event in EVENTS), seen
