"""A state machine over vLLM's scheduler: whatever clients and copy streams do, every token stays readable.

The rig checks after each call; here are the moves. `tests/scheduler/ -m long` makes 100,000 steps of it.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

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

from vllm_hisparse.testing.engine_config import EngineOptions, make_vllm_config, minimum_device_blocks
from vllm_hisparse.testing.model_runner import VOCABULARY
from vllm_hisparse.testing.scheduler import ALL, SchedulerRig

ENGINES = st.fixed_dictionaries(
    {
        "num_parts": st.sampled_from([1, 3]),
        "indexer_pages": st.sampled_from([1, 3]),
        "num_ranks": st.sampled_from([1, 2]),
        "num_drafts": st.sampled_from([0, 0, 2]),
        "hot_rows": st.sampled_from([12, 16]),
        "max_hot_rows": st.sampled_from([16, 32]),
        "async_scheduling": st.booleans(),
        "kv_role": st.sampled_from(["kv_both", "kv_producer"]),
        "prefix_caching": st.sampled_from([True, True, True, False]),
        "low": st.sampled_from([0.0, 0.1, 0.3]),
        "high": st.sampled_from([0.35, 0.7]),
        "eager_host_mirror": st.booleans(),
        "always_host": st.sampled_from([False, False, False, True]),
        "prefix_share": st.sampled_from([0.0, 0.5]),
        "max_requests": st.sampled_from([2, 6]),
        "max_step_tokens": st.sampled_from([12, 40]),
        "max_model_len": st.sampled_from([48, 96]),
    }
)
COUNTS = st.sampled_from([0, 0, 1, 2, ALL])


class Machine(RuleBasedStateMachine):
    """Clients that come, go and share prefixes; copies that end late, and in another step on each rank."""

    num_steps = 0  # of all machines

    @initialize(
        engine=ENGINES,
        spare_device=st.sampled_from([0, 2, 12, 60]),
        spare_host=st.sampled_from([0, 3, 60]),
        timing=st.sampled_from(["early", "late", "split"]),
        seed=st.integers(0, 99),
    )
    def start(
        self, engine: dict[str, Any], spare_device: int, spare_host: int, timing: Any, seed: int
    ) -> None:
        """Pools from the smallest that planning accepts."""
        self.directory = tempfile.TemporaryDirectory()
        path = Path(self.directory.name)
        asked = EngineOptions(**engine)
        num_device = minimum_device_blocks(make_vllm_config(asked, path), asked) + spare_device
        num_host = -(-asked.max_model_len // asked.page_tokens) + 2 + spare_host
        options = EngineOptions(**engine, num_device_blocks=num_device, num_host_blocks=num_host)
        self.rig = SchedulerRig(options, path, timing, seed)
        self.num_added = 0

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 80),
        own=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 40),
    )
    def add(self, family: int, shared: int, own: list[int], max_tokens: int) -> None:
        longest = self.rig.options.max_model_len - 1
        prompt = ([(family * 7 + j * 3) % VOCABULARY for j in range(shared)] + own)[-longest:]
        self.rig.add(f"r{self.num_added}", prompt, min(max_tokens, longest + 1 - len(prompt)))
        self.num_added += 1

    @rule(counts=st.lists(COUNTS, min_size=2, max_size=2), misses=st.sampled_from([0, 0, 50]))
    def step(self, counts: list[int], misses: int) -> None:
        self.rig.num_misses = misses
        self.rig.step(*counts[: len(self.rig.ranks)])

    @rule(counts=st.lists(COUNTS, min_size=2, max_size=12), watch=st.booleans())
    def steps(self, counts: list[int], watch: bool) -> None:
        self.rig.watch_refusals = watch
        for count in counts:
            self.rig.step(*[count] * len(self.rig.ranks))

    @precondition(lambda self: self.rig.scheduler.requests)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        requests = list(self.rig.scheduler.requests)
        self.rig.abort(requests[which % len(requests)])

    @precondition(lambda self: self.rig.scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.rig.preempt()

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        scheduler = self.rig.scheduler
        if not (running and scheduler.defer_block_free):  # vLLM refuses: test_lifecycle.py
            self.rig.reset(running)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.watch_refusals = False
            self.rig.run(4000)
            Machine.num_steps += len(self.rig.messages)
            self.directory.cleanup()


def run(max_examples: int, num_rules: int) -> int:
    """Steps that were scheduled."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    Machine.num_steps = 0
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_rules,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    return Machine.num_steps


def test_machine() -> None:
    assert run(max_examples=150, num_rules=40) > 2000


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_machine_for_long() -> None:
    assert run(max_examples=2500, num_rules=50) > 100_000
