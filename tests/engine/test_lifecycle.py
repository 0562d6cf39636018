"""Aborts, preemptions and restores while pages are on the way: nothing leaks, the rest is exact."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from tests.engine.workload import ENGINE_ARGS, ModelPath, Reference, differences, prompts
from vllm_hisparse.scheduler.residency import PageState
from vllm_hisparse.testing.harness import HiSparseEngine, LateCopies, Prompt, hisparse, hisparse_engine
from vllm_hisparse.testing.models import SEPARATE

pytestmark = pytest.mark.engine

DTYPE = "bfloat16"  # one part of three layers
SPARE_BLOCKS = 6  # left to requests that grow: regions may not starve them


def tight_engine(model_path: ModelPath, num_blocks: int, low: float, high: float, **engine_args: Any) -> Any:
    return hisparse_engine(
        model_path(SEPARATE),
        dtype=DTYPE,
        num_gpu_blocks_override=num_blocks,
        kv_transfer_config=hisparse(low_watermark=low, high_watermark=high),
        **{**ENGINE_ARGS, **engine_args},
    )


def run_with_aborts(
    engine: HiSparseEngine, requests: Sequence[Prompt], states: Collection[PageState]
) -> dict[str, int]:
    """Abort a request that has a page in each of `states`, and ask for it again.

    Returns the index in `requests` of every request that has ended.
    """
    index = {engine.add(prompt): i for i, prompt in enumerate(requests)}
    missing = set(states)
    while engine.num_unfinished:
        engine.step()
        engine.check_integrity()
        victim = next((r for s in sorted(missing) for r in engine.requests_with(s)), None)
        if victim is not None:
            missing -= {state for state in missing if victim in engine.requests_with(state)}
            engine.abort(victim)
            engine.check_integrity()
            again = index.pop(victim)
            index[engine.add(requests[again])] = again
    assert not missing, f"no request had a page in {missing}"
    return index


def test_abort_in_every_page_state(model_path: ModelPath, reference: Reference) -> None:
    """Only pages of a pool that empties are restored: that state has requests of its own. Pages that come
    from another engine are aborted in test_nixl.py.
    """
    expected = reference(SEPARATE, DTYPE)
    filling, emptying = prompts((24, 8, 20, 8)), prompts((44, 8), count=6)
    with tight_engine(model_path, 26, 0.3, 0.35) as engine:
        engine.use_copies(LateCopies(5))
        elsewhere = {PageState.RESTORING, PageState.IMPORTING, PageState.IMPORTING_HOST}
        ended = run_with_aborts(engine, filling, set(PageState) - elsewhere)
        ended |= run_with_aborts(engine, emptying, {PageState.RESTORING})
        engine.finish()
        assert len(ended) == len(filling) + len(emptying)
    for request_id, i in ended.items():
        assert differences([engine.completions[request_id]], [expected[i]]) == []


def test_preempted_requests_resume_exactly(model_path: ModelPath, reference: Reference) -> None:
    """Short requests that outgrow a pool in which HiSparse has nothing to give."""
    expected = reference(SEPARATE, DTYPE)
    with tight_engine(model_path, 18, 0.5, 0.6, max_model_len=384) as engine:
        engine.use_copies(LateCopies(2))
        completions = engine.run(prompts(48), engine.check_integrity)
        engine.finish()
        assert engine.num_preemptions > 0
        assert engine.pages["spilled"] > 0
    assert differences(completions, expected) == []


def test_pages_leave_and_return(model_path: ModelPath, reference: Reference) -> None:
    """Half of the requests end early; the others get their pages back and need no hot region any more."""
    expected = reference(SEPARATE, DTYPE)
    seen = set()
    with tight_engine(model_path, 26, 0.3, 0.35) as engine:
        engine.use_copies(LateCopies(2))
        coordinator = engine.coordinator

        def look() -> None:
            engine.check_integrity()
            seen.update(s for s in PageState if any(r.pages.count(s) for r in coordinator.records.values()))

        completions = engine.run(prompts((44, 8), count=6), look)
        assert PageState.RESTORING in seen
        assert engine.pages["restored"] > 0
        assert coordinator.regions.counters.returned > 0
        engine.finish()
        again = engine.run(prompts(16, count=4), look)
        engine.finish()
    assert differences(completions, expected) == []
    assert differences(again, expected) == []


def test_regions_grow_and_shrink(model_path: ModelPath, reference: Reference) -> None:
    """Hot regions change their size again and again, whatever the policy would have said."""
    expected = reference(SEPARATE, DTYPE)
    with hisparse_engine(
        model_path(SEPARATE),
        dtype=DTYPE,
        num_gpu_blocks_override=26,
        kv_transfer_config=hisparse(low_watermark=0.45, high_watermark=0.9, max_hot_rows=256),
        **ENGINE_ARGS,
    ) as engine:
        coordinator, regions = engine.coordinator, engine.coordinator.regions

        def resize() -> None:
            engine.check_integrity()
            for record in coordinator.records.values():
                if record.region is None:
                    continue
                if excess := regions.excess(record.region):
                    coordinator.shrink_region(record, excess)
                elif coordinator.pool.get_num_free_blocks() > SPARE_BLOCKS:
                    coordinator.grow_region(record, min(2, regions.room_to_grow(record.region)))

        completions = engine.run(prompts(24, count=8), resize)
        engine.finish()
        assert regions.counters.grown_blocks > 20
        assert regions.counters.shrunk_blocks > 20
        assert engine.rows["hits"] > 0
    assert differences(completions, expected) == []
