"""A newcomer that was refused is not asked about again until that can have changed."""

import random
from typing import Any

import pytest

from vllm_hisparse.scheduler.queueing import MAX_AGE
from vllm_hisparse.scheduler.refusal import Refusal
from vllm_hisparse.testing.scheduler import ALL, SchedulerRig

TIGHT = {"num_device_blocks": 36, "num_host_blocks": 400, "max_requests": 6, "low": 0.0, "high": 0.1}


def crowded(make_rig: Any, **options: Any) -> SchedulerRig:
    """A request runs for long, and one waits that does not fit beside it."""
    rig: SchedulerRig = make_rig(**{**TIGHT, **options})
    rig.add("runs", range(24), max_tokens=60)
    for _ in range(4):
        rig.step()
    rig.add("waits", range(100, 180))
    for _ in range(4):
        rig.step()
    assert set(rig.coordinator.records) == {"runs"}
    return rig


def count_lookups(rig: SchedulerRig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    coordinator = rig.scheduler.kv_cache_manager.coordinator
    lookups: list[str] = []
    find = coordinator.find_longest_cache_hit

    def counted(*args: Any) -> Any:
        lookups.append("found")
        return find(*args)

    monkeypatch.setattr(coordinator, "find_longest_cache_hit", counted)
    return lookups


def test_it_is_looked_up_once_in_a_while(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = crowded(make_rig, prefix_share=0.0, max_passing=0)
    assert rig.coordinator.refusal.stands("waits")
    lookups = count_lookups(rig, monkeypatch)
    for _ in range(2 * MAX_AGE):
        rig.step()
    assert set(rig.coordinator.records) == {"runs"}
    assert 0 < len(lookups) < MAX_AGE


def refuse(rig: SchedulerRig, num_missing: int) -> Refusal:
    refusal = rig.coordinator.refusal
    refusal.note("waits", rig.coordinator.pool.get_num_free_blocks() + num_missing)
    assert refusal.stands("waits")
    assert not refusal.stands("another")  # which must have come before it
    return refusal


@pytest.mark.parametrize("event", ["end", "arrival", "region", "room on the host"])
def test_it_is_asked_about_as_soon_as_something_has_changed(make_rig: Any, event: str) -> None:
    rig = crowded(make_rig)
    coordinator = rig.coordinator
    held = coordinator.host_pool.get_new_blocks(1) if event == "room on the host" else []
    refusal = refuse(rig, 1000)
    if event == "end":
        rig.abort("runs")
    elif event == "arrival":
        rig.add("comes", range(300, 304))
    elif event == "region":
        coordinator.pressure.note_change()
    coordinator.host_pool.free_blocks(held)
    assert not refusal.stands("waits")
    rig.run()


def test_it_is_asked_about_once_it_could_have_what_it_lacked(make_rig: Any) -> None:
    """Blocks that came free and pages that the host has got count alike; fewer change nothing."""
    rig = crowded(make_rig)
    pool, reclaimer = rig.coordinator.pool, rig.coordinator.reclaimer
    running = rig.coordinator.records["runs"]
    held = pool.get_new_blocks(2)
    refusal = refuse(rig, 4)
    pool.free_blocks(held)
    reclaimer.note_clean(running)
    assert refusal.stands("waits")
    reclaimer.note_clean(running)
    assert not refusal.stands("waits")
    rig.run()


def test_a_request_that_holds_blocks_is_not_refused_for_another(make_rig: Any) -> None:
    rig = crowded(make_rig)
    assert rig.coordinator.refusal.stands("waits")
    for _ in range(70):
        rig.step()
    assert len(rig.outputs["runs"]) == 60
    rig.run()
    assert len(rig.outputs["waits"]) == 8


def load(make_rig: Any, seed: int) -> tuple[int, list[tuple[int, str]]]:
    """A random load: steps that it takes, and when each request starts."""
    chance = random.Random(seed)
    rig: SchedulerRig = make_rig(
        **TIGHT
        | {"num_device_blocks": 42, "low": chance.choice([0.0, 0.2]), "high": chance.choice([0.3, 0.6])},
        prefix_share=chance.choice([0.0, 0.5]),
        max_passing=chance.choice([0, 4]),
        async_scheduling=chance.random() < 0.5,
        policy=chance.choice(["fcfs", "priority"]),
        num_offload_chunks=chance.choice([0, 100]),
    )
    prefixes = [[chance.randrange(1000) for _ in range(40)] for _ in range(chance.randrange(1, 4))]
    starts: list[tuple[int, str]] = []
    for number in range(14):
        prompt = chance.choice(prefixes)[: chance.randrange(41)] + [number] * chance.randrange(1, 30)
        rig.add(f"r{number}", prompt, max_tokens=chance.randrange(1, 24), priority=chance.randrange(3))
    while rig.scheduler.has_requests() or rig.in_flight:
        rig.step(chance.choice([0, 1, ALL]))  # copies that end late
        starts += [
            (len(rig.messages), r) for r in rig.coordinator.records if r not in {name for _, name in starts}
        ]
    rig.run()
    return len(rig.messages), starts


@pytest.mark.parametrize("seed", range(16))
def test_nobody_starts_later_for_it(make_rig: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The same load, with every question asked."""
    stood = 0
    stands = Refusal.stands

    def counted(refusal: Refusal, request_id: str) -> bool:
        nonlocal stood
        answer = stands(refusal, request_id)
        stood += answer
        return answer

    monkeypatch.setattr(Refusal, "stands", counted)
    remembered = load(make_rig, seed)
    assert stood > 0
    with monkeypatch.context() as patch:
        patch.setattr(Refusal, "stands", lambda *_: False)
        assert load(make_rig, seed) == remembered
