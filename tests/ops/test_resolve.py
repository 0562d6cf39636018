"""The C++ kernel of `resolve` against the reference, bit by bit: outputs, state, plans and counters."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.case import (
    INT_MAX,
    INT_MIN,
    POISON,
    Geometry,
    Outputs,
    State,
    Step,
    Tables,
    assert_same,
    int32,
    random_step,
    random_tables,
    resized,
    run_resolve,
)
from vllm_hisparse import ops


def check_step(
    geometry: Geometry,
    tables: Tables,
    state: State,
    step: Step,
    policy: ops.Policy,
    parts: tuple[int, ...] = (0,),
) -> Outputs:
    """Runs both implementations from the same state, compares everything, leaves `state` updated."""
    reference_state = state.clone()
    want = run_resolve(ops.reference, geometry, tables, reference_state, step, policy, parts)
    got = run_resolve(ops, geometry, tables, state, step, policy, parts)
    assert_same(got, want)
    assert_same(state, reference_state)
    state.check_integrity(tables.hot_rows)
    assert not (got.rows == POISON).any()
    assert not (got.counts == POISON).any()
    assert not (got.plan_count == POISON).any()
    return got


@pytest.mark.parametrize("policy", list(ops.Policy))
@pytest.mark.parametrize("seed", range(12))
def test_random_worlds(seed: int, policy: ops.Policy) -> None:
    random = np.random.default_rng(seed)
    geometry = Geometry(
        block_size=int(random.choice([1, 4, 8, 64])),
        max_pages=int(random.integers(1, 20)),
        max_slots=int(random.integers(1, 120)),
        num_parts=int(random.integers(1, 5)),
        top_k=int(random.integers(1, 70)),
        max_query_rows=int(random.integers(1, 9)),
    )
    tables, state = random_tables(geometry, random), State.empty(geometry)
    for _ in range(12):
        num_parts = int(random.integers(1, 4))
        parts = tuple(int(part) for part in random.integers(0, geometry.num_parts, num_parts))
        check_step(geometry, tables, state, random_step(geometry, random), policy, parts)


@pytest.mark.parametrize("policy", list(ops.Policy))
@pytest.mark.parametrize("max_query_rows", [1, 4, 8])
@pytest.mark.parametrize("top_k", [1, 31, 32, 33, 63, 64, 65, 128])
def test_sizes_around_a_warp(top_k: int, max_query_rows: int, policy: ops.Policy) -> None:
    random = np.random.default_rng(top_k)
    geometry = Geometry(
        top_k=top_k, max_query_rows=max_query_rows, max_slots=2 * top_k + 1, max_pages=max(2, top_k // 2)
    )
    tables, state = random_tables(geometry, random), State.empty(geometry)
    for num_slots in (2 * top_k, 2 * top_k + 1):
        tables.hot_rows[:] = num_slots
        check_step(geometry, tables, state, random_step(geometry, random), policy)


@pytest.mark.parametrize("policy", list(ops.Policy))
@pytest.mark.parametrize("num_query_rows", [1, 2, 8])
def test_full_size(num_query_rows: int, policy: ops.Policy) -> None:
    """k = 2048, B = 2k, selections that drift from step to step."""
    random = np.random.default_rng(num_query_rows)
    geometry = Geometry(
        block_size=64,
        max_pages=256,
        max_requests=2,
        num_regions=2,
        max_slots=4096,
        num_parts=1,
        top_k=2048,
        max_query_rows=num_query_rows,
    )
    tables, state = random_tables(geometry, random), State.empty(geometry)
    tables.hot_rows[:] = geometry.max_slots
    scores = random.standard_normal(geometry.max_positions)
    starts = torch.arange(3, dtype=torch.int32) * num_query_rows
    for _ in range(3):
        selections = []
        for _ in range(2 * num_query_rows):
            scores += 0.2 * random.standard_normal(len(scores))
            selections.append(np.argsort(scores)[-2048:])
        topk = torch.tensor(np.stack(selections), dtype=torch.int32)
        check_step(
            geometry, tables, state, Step(topk, starts, torch.tensor([1, 0], dtype=torch.int32)), policy
        )


@given(data=st.data())
@settings(max_examples=150)
def test_any_selection(data: st.DataObject) -> None:
    """Small worlds, shrinkable: every kind of index, repeats, any cut into batch rows."""
    geometry = Geometry(block_size=2, max_pages=6, max_slots=5, top_k=3, max_query_rows=2, num_parts=1)
    random = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    tables, state = random_tables(geometry, random), State.empty(geometry)
    policy = data.draw(st.sampled_from(ops.Policy))
    index = st.integers(0, 11) | st.sampled_from([-1, INT_MIN, INT_MAX, 12])
    for _ in range(data.draw(st.integers(1, 5))):
        lengths = data.draw(st.lists(st.integers(0, 3), max_size=3))
        num_query_rows = sum(lengths) + data.draw(st.integers(0, 1))
        count = num_query_rows * geometry.top_k
        topk = data.draw(st.lists(index, min_size=count, max_size=count))
        requests = data.draw(st.permutations(range(geometry.max_requests)))[: len(lengths)]
        step = Step(
            torch.tensor(topk, dtype=torch.int32).view(num_query_rows, geometry.top_k),
            torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
            torch.tensor([q if data.draw(st.integers(0, 4)) else -1 for q in requests], dtype=torch.int32),
        )
        check_step(geometry, tables, state, step, policy)


@pytest.mark.parametrize("policy", list(ops.Policy))
def test_regions_that_grow_and_shrink(policy: ops.Policy) -> None:
    random = np.random.default_rng(7)
    geometry = Geometry(max_slots=64, max_pages=12, top_k=12)
    tables, state = random_tables(geometry, random), State.empty(geometry)
    for _ in range(60):
        region, size = (
            int(random.integers(geometry.num_regions)),
            int(random.integers(geometry.max_slots + 1)),
        )
        if size < tables.hot_rows[region]:
            arguments = (int32(1, fill=region), int32(1, fill=size), int32(1, fill=geometry.max_positions))
            ops.forget(
                **vars(state), regions=arguments[0], first_slot=arguments[1], first_position=arguments[2]
            )
        tables = resized(tables, region, size)
        check_step(geometry, tables, state, random_step(geometry, random), policy)


@pytest.mark.parametrize("idle_steps", [700, 880, 890, 900, 910, 920, 1100, 70_000, 2**29])
@pytest.mark.parametrize("policy", list(ops.Policy))
def test_rows_that_nothing_asked_for_in_a_long_time(policy: ops.Policy, idle_steps: int) -> None:
    """Ages around and past the cap, ghosts that saturate, keys far into the range of an int32."""
    random = np.random.default_rng(idle_steps)
    geometry = Geometry(max_slots=64, top_k=16)
    tables, state = random_tables(geometry, random), State.empty(geometry)
    tables.hot_rows[:] = geometry.max_slots
    for _ in range(2):
        for _ in range(40):
            check_step(geometry, tables, state, random_step(geometry, random), policy)
        state.clock += idle_steps


def test_all_resident_leaves_the_state_alone() -> None:
    random = np.random.default_rng(3)
    geometry = Geometry()
    tables, state = random_tables(geometry, random), State.empty(geometry)
    check_step(geometry, tables, state, random_step(geometry, random), ops.Policy.LRFU)
    tables = replace(tables, resident=tables.resident.abs())
    before = state.clone()
    outputs = check_step(geometry, tables, state, random_step(geometry, random), ops.Policy.LRFU)
    assert_same(state, before)
    assert not outputs.plan_count.any()


def test_requests_without_a_region_and_long_rows_read_resident_pages_only() -> None:
    random = np.random.default_rng(4)
    geometry = Geometry(max_query_rows=1)
    tables, state = random_tables(geometry, random), State.empty(geometry)
    step = Step(
        torch.arange(5 * 8, dtype=torch.int32).view(5, 8),
        torch.tensor([0, 1, 2, 4, 5], dtype=torch.int32),
        torch.tensor([0, 1, 2, 3], dtype=torch.int32),
    )
    tables.hot_region[:] = torch.tensor([-1, 0, 1, 2])  # none; of size 0; two query rows; one that serves
    tables.hot_rows[:] = torch.tensor([0, 40, 40])
    tables.resident[:] = -1
    tables.host[:] = tables.host.abs()
    outputs = check_step(geometry, tables, state, step, ops.Policy.LRFU)
    assert outputs.counts.tolist() == [0, 0, 0, 0, 8]
    assert outputs.plan_count.tolist() == [0, 0, 0, 8]
    assert state.clock.tolist() == [0, 0, 1]


def test_layers_in_two_parts_get_their_own_rows() -> None:
    random = np.random.default_rng(5)
    geometry = Geometry(num_parts=3)
    tables, state = random_tables(geometry, random), State.empty(geometry)
    both = check_step(geometry, tables, state.clone(), random_step(geometry, random), ops.Policy.LRFU, (2, 1))
    random = np.random.default_rng(5)
    random_tables(geometry, random)
    one = check_step(geometry, tables, state.clone(), random_step(geometry, random), ops.Policy.LRFU, (1,))
    assert torch.equal(both.rows[1], one.rows[0])
    assert torch.equal(both.rows[0] >= 0, both.rows[1] >= 0)
    assert not torch.equal(both.rows[0], both.rows[1])


def test_index_groups_do_not_share_state() -> None:
    """Two groups over the same tables, with selections of their own, end where each ends alone."""
    random = np.random.default_rng(6)
    geometry = Geometry()
    tables = random_tables(geometry, random)
    steps = [[random_step(geometry, random) for _ in range(6)] for _ in range(2)]
    together = [State.empty(geometry) for _ in range(2)]
    for i in range(6):
        for group in range(2):
            check_step(geometry, tables, together[group], steps[group][i], ops.Policy.LRFU, (group,))
    for group in range(2):
        alone = State.empty(geometry)
        for step in steps[group]:
            run_resolve(ops, geometry, tables, alone, step, ops.Policy.LRFU, (group,))
        assert_same(together[group], alone)
