"""`forget`: the kernel against the reference, and hot regions over their whole life."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.ops.case import (
    Geometry,
    State,
    Tables,
    assert_same,
    int32,
    random_step,
    random_tables,
    run_resolve,
)
from vllm_hisparse import ops


def forget_both(state: State, regions: list[int], first_slot: list[int], first_position: list[int]) -> None:
    arguments = {
        "regions": torch.tensor(regions, dtype=torch.int32),
        "first_slot": torch.tensor(first_slot, dtype=torch.int32),
        "first_position": torch.tensor(first_position, dtype=torch.int32),
    }
    want = state.clone()
    ops.reference.forget(**vars(want), **arguments)
    ops.forget(**vars(state), **arguments)
    assert_same(state, want)


def used_state(geometry: Geometry) -> tuple[Tables, State]:
    random = np.random.default_rng(1)
    tables, state = random_tables(geometry, random), State.empty(geometry)
    tables.resident[:] = -1
    tables.hot_rows[:] = geometry.max_slots
    tables.hot_region[:] = torch.tensor([2, 0, 1, -1])
    for _ in range(100):
        run_resolve(ops, geometry, tables, state, random_step(geometry, random), ops.Policy.LRFU)
    assert (state.slot_of < -1).any(dim=1).all()  # every region has seen evictions
    return tables, state


def test_reset_leaves_nothing() -> None:
    geometry = Geometry()
    _, state = used_state(geometry)
    forget_both(state, [0, 1, 2], [0, 0, 0], [10**6, 0, -5])
    assert_same(state, State.empty(geometry))


def test_shrink_keeps_the_slots_below() -> None:
    geometry = Geometry()
    tables, state = used_state(geometry)
    before = state.clone()
    forget_both(state, [1], [10], [geometry.max_positions])
    assert torch.equal(state.position_of[1, :10], before.position_of[1, :10])
    assert (state.position_of[1, 10:] == -1).all()
    assert torch.equal(state.clock, before.clock)
    assert torch.equal(state.slot_of[1] < -1, before.slot_of[1] < -1)  # histories of evicted rows stay
    tables.hot_rows[1] = 10
    state.check_integrity(tables.hot_rows)


def test_rewritten_tail_loses_its_rows_and_its_history() -> None:
    geometry = Geometry()
    tables, state = used_state(geometry)
    forget_both(state, [2], [geometry.max_slots], [40])
    assert (state.slot_of[2, 40:] == -1).all()
    assert (state.position_of[2] < 40).all()
    state.check_integrity(tables.hot_rows)


def test_nothing_to_forget() -> None:
    geometry = Geometry()
    _, state = used_state(geometry)
    before = state.clone()
    forget_both(state, [], [], [])
    forget_both(state, [0], [geometry.max_slots], [geometry.max_positions])
    assert_same(state, before)


class RegionLife(RuleBasedStateMachine):
    """Regions that serve, grow, shrink, lose a tail and change hands; kernel and reference side by side."""

    @initialize(seed=st.integers(0, 2**16), policy=st.sampled_from(ops.Policy))
    def start(self, seed: int, policy: ops.Policy) -> None:
        self.random = np.random.default_rng(seed)
        self.policy = policy
        self.geometry = Geometry(block_size=4, max_pages=8, max_slots=20, top_k=6, max_query_rows=3)
        self.tables = random_tables(self.geometry, self.random)
        self.state, self.want = State.empty(self.geometry), State.empty(self.geometry)

    def forget(self, region: int, first_slot: int, first_position: int) -> None:
        arguments = [int32(1, fill=value) for value in (region, first_slot, first_position)]
        for implementation, state in ((ops, self.state), (ops.reference, self.want)):
            implementation.forget(*vars(state).values(), *arguments)

    @rule()
    def serve(self) -> None:
        step = random_step(self.geometry, self.random)
        got = run_resolve(ops, self.geometry, self.tables, self.state, step, self.policy, (1, 0))
        want = run_resolve(ops.reference, self.geometry, self.tables, self.want, step, self.policy, (1, 0))
        assert_same(got, want)

    @rule(region=st.integers(0, 2), size=st.integers(0, 20))
    def resize(self, region: int, size: int) -> None:
        if size < self.tables.hot_rows[region]:
            self.forget(region, size, self.geometry.max_positions)
        self.tables.hot_rows[region] = size

    @rule(region=st.integers(0, 2), position=st.integers(0, 32))
    def rewrite_tail(self, region: int, position: int) -> None:
        self.forget(region, self.geometry.max_slots, position)

    @rule(request=st.integers(0, 3), region=st.integers(0, 2))
    def change_hands(self, request: int, region: int) -> None:
        self.forget(region, 0, 0)
        owners = self.tables.hot_region
        owners[owners == region] = -1
        owners[request] = region

    @rule(request=st.integers(0, 3), page=st.integers(0, 7))
    def restore_or_spill_a_page(self, request: int, page: int) -> None:
        resident = self.tables.resident[:, request, page]
        resident[:] = -1 if resident[0] >= 0 else torch.tensor([500, 501])

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "state"):
            assert_same(self.state, self.want)
            self.state.check_integrity(self.tables.hot_rows)


RegionLife.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestRegionLife = pytest.mark.usefixtures("cpu_library")(RegionLife.TestCase)
