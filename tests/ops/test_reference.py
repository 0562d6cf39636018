"""The reference against policies written a second time, a worked example, and the formula of LRFU."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.case import Geometry, State, Step, Tables, int32, run_resolve
from tests.ops.oracle import LrfuOracle, LruOracle
from vllm_hisparse import ops
from vllm_hisparse.ops import reference

NUM_SLOTS = 8


def world(geometry: Geometry, num_slots: int) -> Tables:
    """One request, everything on the host, a region with `num_slots` usable slots."""
    g = geometry
    return Tables(
        resident=int32(g.num_parts, g.max_requests, g.max_pages, fill=-1),
        host=torch.arange(g.max_requests * g.max_pages, dtype=torch.int32).view(g.max_requests, g.max_pages),
        hot=torch.arange(g.num_parts * g.num_regions * g.max_hot_blocks, dtype=torch.int32).view(
            g.num_parts, g.num_regions, g.max_hot_blocks
        ),
        hot_rows=int32(g.num_regions, fill=num_slots),
        hot_region=torch.arange(g.max_requests, dtype=torch.int32),
    )


def step_of(positions: list[int], top_k: int) -> Step:
    topk = int32(1, top_k, fill=-1)
    topk[0, : len(positions)] = torch.tensor(positions, dtype=torch.int32)
    return Step(topk, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32))


def test_the_worked_example() -> None:
    """Two hits, one miss, the newest row resident: hits become newest, then the loaded row, then all else."""
    g = Geometry(max_requests=1, num_regions=1, num_parts=1, max_slots=8, top_k=4, max_query_rows=1)
    tables, state = world(g, num_slots=8), State.empty(g)
    state.position_of[0] = torch.tensor([10, 11, 12, 13, 14, 15, 16, 17])
    state.slot_of[0, 10:18] = torch.arange(8).short()
    state.key[0] = torch.arange(8).int()
    state.clock[0] = 20
    newest = 127
    tables.resident[0, 0, newest // g.block_size] = 5
    outputs = run_resolve(reference, g, tables, state, step_of([12, 16, 25, newest], 4), ops.Policy.LRU)
    order = sorted(range(8), key=lambda slot: (int(state.key[0, slot]), slot))
    assert order == [1, 3, 4, 5, 7, 0, 2, 6]
    assert state.position_of[0].tolist() == [25, 11, 12, 13, 14, 15, 16, 17]
    assert outputs.rows[0, 0].tolist() == [2, 6, 0, 5 * g.block_stride_rows + newest % g.block_size]
    assert (outputs.plan_count.tolist(), outputs.plan_host_row[0, 0].item()) == ([1], 25)
    assert (outputs.counters - torch.arange(8)).tolist() == [2, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("policy", list(ops.Policy))
@given(
    selections=st.lists(st.lists(st.integers(0, 23), min_size=1, max_size=10), min_size=1, max_size=40),
    num_slots=st.integers(1, 12),
)
@settings(max_examples=100)
def test_region_follows_the_oracle(policy: ops.Policy, selections: list[list[int]], num_slots: int) -> None:
    g = Geometry(max_requests=1, num_regions=1, num_parts=1, max_slots=12, top_k=10, max_query_rows=1)
    tables, state = world(g, num_slots), State.empty(g)
    oracle = LruOracle() if policy == ops.Policy.LRU else LrfuOracle()
    for positions in selections:
        outputs = run_resolve(reference, g, tables, state, step_of(positions, 10), policy)
        wanted = list(dict.fromkeys(positions))
        loaded = oracle.step(wanted, num_slots)
        count = int(outputs.plan_count[0])
        plan = list(
            zip(outputs.plan_host_row[0, :count].tolist(), outputs.plan_slot[0, :count].tolist(), strict=True)
        )
        assert plan == loaded  # with host block i for page i, the host row is the position
        assert {p: s for p, s in enumerate(state.slot_of[0].tolist()) if s >= 0} == oracle.slots
        physical = [
            oracle.slots[p] // g.block_size * g.block_stride_rows + oracle.slots[p] % g.block_size
            if p in oracle.slots
            else -1
            for p in positions
        ]
        assert outputs.rows[0, 0, : len(positions)].tolist() == physical
        state.check_integrity(tables.hot_rows)


def test_lrfu_key_is_the_logarithm_of_decayed_references() -> None:
    """The recurrence in fixed point stays within half an octave of the sum that it stands for."""
    random = np.random.default_rng(0)
    oracle = LrfuOracle()
    worst = 0.0
    for _ in range(400):
        wanted = sorted({int(p) for p in random.zipf(1.3, 12) if p < 200})
        oracle.step(wanted, 64)
        drift = [
            oracle.keys[p] - 128 - oracle.clock - oracle.weight_log(p)
            for p in oracle.slots
            if p in oracle.keys
        ]
        worst = max(worst, *map(abs, drift))
    assert worst < 12


def test_gain_is_the_rounded_logarithm() -> None:
    gains = [math.floor(16 * math.log2(1 + 2 ** (-d / 16)) + 0.5) for d in range(200)]
    assert gains[: len(reference.GAIN)] == reference.GAIN
    assert not any(gains[len(reference.GAIN) :])


def test_ghosts_fit_and_keep_all_but_one_bit() -> None:
    for key in (129, 130, 1000, 65533, 65535):
        ghost = reference.ghost_of_key(key)
        assert -(2**15) <= ghost < 0
        assert reference.key_of_ghost(ghost) == key // 2 * 2
    assert reference.ghost_of_key(10**6) == -(2**15)
    assert reference.key_of_ghost(-1) == 0


@pytest.mark.parametrize("policy", list(ops.Policy))
@pytest.mark.parametrize("extra", [0, 1])
def test_region_of_exactly_as_many_slots_as_wanted(policy: ops.Policy, extra: int) -> None:
    """B distinct positions fill B slots; one more overflows, and only it."""
    g = Geometry(max_requests=1, num_regions=1, num_parts=1, max_slots=12, top_k=10, max_query_rows=1)
    tables, state = world(g, NUM_SLOTS), State.empty(g)
    positions = list(range(30, 30 + NUM_SLOTS + extra))
    for _ in range(2):
        outputs = run_resolve(reference, g, tables, state, step_of(positions, 10), policy)
        assert int(outputs.counts[0]) == NUM_SLOTS
        assert int((outputs.counters - torch.arange(8))[ops.Counter.OVERFLOW]) == extra
        assert state.position_of[0, :NUM_SLOTS].tolist() == positions[:NUM_SLOTS]
