"""Requests whose prefix is there are admitted before those that would push prefixes out, a few at a time."""

from collections.abc import Sequence
from typing import Any

import pytest

from vllm_hisparse.scheduler.queueing import MAX_AGE
from vllm_hisparse.testing.scheduler import SchedulerRig

# A page is 4 tokens and takes a resident and an indexer block. Two requests decode at a time.
POOL = {
    "num_device_blocks": 69,
    "num_host_blocks": 400,
    "max_requests": 2,
    "low": 0.1,
    "high": 0.9,
    "prefix_share": 0.5,
}
WARM = [range(100 * n, 100 * n + 48) for n in range(1, 4)]  # prompts that have been served before
COLD = range(900, 948)


def start(
    rig: SchedulerRig, request_id: str, tokens: Sequence[int], max_tokens: int = 4, **options: Any
) -> None:
    rig.add(request_id, [*tokens, 99], max_tokens=max_tokens, **options)


def order_of_admission(rig: SchedulerRig) -> list[str]:
    """Runs to the end. Requests that are admitted in one step are in the order of the batch."""
    admitted: list[str] = []
    while rig.scheduler.requests:
        rig.step()
        admitted += [r for r in rig.coordinator.records if r not in admitted]
    return admitted


@pytest.fixture
def crowded(make_rig: Any) -> Any:
    """Makes a rig that keeps the keys of `WARM`, and in which a request runs for long."""

    def make(**options: Any) -> SchedulerRig:
        rig = make_rig(**{**POOL, **options})
        for n, tokens in enumerate(WARM):
            rig.add(f"before {n}", tokens, max_tokens=1)
            rig.run()
        start(rig, "runs", range(800, 820), max_tokens=60)
        for _ in range(4):
            rig.step()
        return rig

    return make


def finish(rig: SchedulerRig) -> list[str]:
    return [r for r in order_of_admission(rig) if r != "runs"]


def race(rig: SchedulerRig, cold: range = COLD, **options: Any) -> list[str]:
    """The order in which two are admitted that came as "cold" and "warm"."""
    start(rig, "cold", cold, **options)
    start(rig, "warm", WARM[0])
    return finish(rig)


def test_a_request_that_finds_its_prefix_passes(crowded: Any) -> None:
    rig = crowded()
    assert race(rig) == ["warm", "cold"]
    assert rig.coordinator.num_passed == 1


def test_first_come_first_served_without_the_option(crowded: Any) -> None:
    rig = crowded(max_passing=0)
    assert race(rig) == ["cold", "warm"]


def test_only_so_many_pass(crowded: Any) -> None:
    rig = crowded(max_passing=2)
    start(rig, "cold", COLD)
    for n, tokens in enumerate(WARM):
        start(rig, f"warm {n}", tokens)
    assert finish(rig).index("cold") == 2


def test_a_request_passes_only_where_room_costs_prefixes(crowded: Any) -> None:
    """The pool has room for the newcomer beside all keys that are kept."""
    rig = crowded(num_device_blocks=121)
    assert race(rig) == ["cold", "warm"]


def test_room_is_what_leaves_the_low_watermark_free(crowded: Any) -> None:
    """The newcomer would fit without any key lost, but running requests would take keys soon."""
    rig = crowded(num_device_blocks=84)
    unkept = rig.coordinator.leases.order.num_unkept
    assert 8 + 13 <= unkept < 8 + 13 + rig.coordinator.pressure.low  # pages at a time, and keys
    assert race(rig) == ["warm", "cold"]


def test_each_cold_request_lets_so_many_pass(crowded: Any) -> None:
    rig = crowded(max_passing=1)
    for name, tokens in (("cold", COLD), ("next", range(700, 748)), ("warm", WARM[2])):
        start(rig, name, tokens)
    queue = rig.scheduler.connector._queue
    cold, following, warm = (rig.scheduler.requests[name] for name in ("cold", "next", "warm"))
    assert queue.must_wait(cold, 0)
    assert not queue.must_wait(warm, 48)
    queue.note_admission(warm)
    assert not queue.must_wait(cold, 0)
    queue.note_admission(cold)
    assert queue.must_wait(following, 0)
    rig.run()


def test_a_short_request_is_not_passed(crowded: Any) -> None:
    rig = crowded()
    assert race(rig, range(900, 916)) == ["cold", "warm"]


def test_nobody_waits_for_an_idle_engine(make_rig: Any) -> None:
    rig = make_rig(**{**POOL, "num_device_blocks": 60})
    for n, tokens in enumerate(WARM):
        rig.add(f"before {n}", tokens, max_tokens=1)
        rig.run()
    start(rig, "cold", COLD)
    start(rig, "warm", WARM[2])
    rig.step()
    assert "cold" in rig.coordinator.records
    rig.run()


def test_a_more_urgent_request_is_not_passed(crowded: Any) -> None:
    rig = crowded(policy="priority")
    assert race(rig, priority=-1) == ["cold", "warm"]


def test_a_request_that_has_run_is_not_passed(crowded: Any) -> None:
    rig = crowded(max_requests=3)
    start(rig, "cold", COLD, max_tokens=20)
    for _ in range(8):
        rig.step()
    assert "cold" in rig.coordinator.records
    rig.preempt()  # the last that was admitted
    assert "cold" not in rig.coordinator.records
    start(rig, "other", range(700, 748))
    start(rig, "warm", WARM[2])
    queue, requests = rig.scheduler.connector._queue, rig.scheduler.requests
    assert queue.must_wait(requests["other"], 0)
    assert not queue.must_wait(requests["cold"], 0)
    rig.run()


def test_those_that_give_up_are_not_passed_any_more(crowded: Any) -> None:
    """What has been aborted does not count: nobody is passed, so nobody has passed."""
    rig = crowded()
    start(rig, "cold", COLD)
    start(rig, "warm", WARM[0])
    queue = rig.scheduler.connector._queue
    assert queue.must_wait(rig.scheduler.requests["cold"], 0)
    rig.abort("cold")
    assert finish(rig) == ["warm"]
    assert rig.coordinator.num_passed == 0


def test_beside_another_connector_nobody_is_passed(crowded: Any) -> None:
    """It may have what a request does not find here."""
    rig = crowded(num_offload_chunks=4)
    assert race(rig) == ["cold", "warm"]


def test_a_request_does_not_wait_for_itself(crowded: Any) -> None:
    """Its hit is a token short of half its prompt: it is cold, whoever asks."""
    rig = crowded(max_requests=8)
    start(rig, "half", [*WARM[0][:24], *range(700, 724)])  # 24 of 49
    queue = rig.scheduler.connector._queue
    half = rig.scheduler.requests["half"]
    assert rig.scheduler.kv_cache_manager.get_computed_blocks(half)[1] == 24
    assert queue._costs_kept(half)
    assert not queue.must_wait(half, 24)
    rig.run()


def test_a_prefix_that_is_lost_is_not_waited_for(crowded: Any) -> None:
    rig = crowded(max_requests=8)
    start(rig, "cold", COLD)
    start(rig, "warm", WARM[0])
    queue = rig.scheduler.connector._queue
    cold, warm = (rig.scheduler.requests[name] for name in ("cold", "warm"))
    assert queue.must_wait(cold, 0)
    pool = rig.coordinator.pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))  # others have used every block since
    hit = rig.scheduler.kv_cache_manager.get_computed_blocks(warm)[1]
    assert hit == 0
    assert not queue.must_wait(warm, hit)
    assert not queue.must_wait(cold, 0)
    rig.run()


def test_those_that_wait_are_looked_up_once_in_a_while(crowded: Any, monkeypatch: Any) -> None:
    """And not in every step, each of them: that would take longer than a step."""
    rig = crowded(max_requests=8)
    for n in range(6):
        start(rig, f"cold {n}", range(1000 + 100 * n, 1048 + 100 * n))
    start(rig, "warm", WARM[0])
    scheduler = rig.scheduler
    queue = scheduler.connector._queue
    lookups: list[int] = []
    find = scheduler.kv_cache_manager.coordinator.find_longest_cache_hit

    def counted(*args: Any) -> Any:
        lookups.append(len(scheduler.running))
        return find(*args)

    monkeypatch.setattr(scheduler.kv_cache_manager.coordinator, "find_longest_cache_hit", counted)
    cold = [scheduler.requests[f"cold {n}"] for n in range(6)]

    def ask() -> list[bool]:
        """As vLLM does in every step."""
        answers = [queue.must_wait(r, scheduler.kv_cache_manager.get_computed_blocks(r)[1]) for r in cold]
        queue.end_step()
        return answers

    queue._reconsider()
    assert ask() == [True] * 6
    # And the first one's warm one, found last, its first keys before the rest.
    assert len(lookups) == 6 + 6 + 2
    for _ in range(MAX_AGE - 1):
        assert ask() == [True] * 6
    assert len(lookups) == 14
    assert ask() == [True] * 6
    assert len(lookups) == 28
    rig.abort("warm")
    assert ask() == [False] * 6  # whom would they wait for?
    rig.run()


def test_room_is_noticed_at_once(crowded: Any) -> None:
    """A request that stays put off is looked up again as soon as it costs nobody a prefix."""
    rig = crowded(max_requests=8)
    start(rig, "cold", COLD)
    start(rig, "warm", WARM[0])
    queue, manager = rig.scheduler.connector._queue, rig.scheduler.kv_cache_manager
    cold = rig.scheduler.requests["cold"]
    assert queue.must_wait(cold, manager.get_computed_blocks(cold)[1])
    rig.coordinator.pressure.low -= 100
    assert not queue._costs_kept(cold)
    assert not queue.must_wait(cold, manager.get_computed_blocks(cold)[1])
    rig.coordinator.pressure.low += 100
    rig.run()


def test_somebody_who_comes_may_pass(crowded: Any) -> None:
    """That nobody was warm holds for those who were there."""
    rig = crowded(max_requests=8)
    start(rig, "cold", COLD)
    queue = rig.scheduler.connector._queue
    cold = rig.scheduler.requests["cold"]
    assert not queue.must_wait(cold, 0)
    start(rig, "warm", WARM[0])
    assert queue.must_wait(cold, 0)
    rig.run()


def test_pages_without_keys_are_not_looked_up(make_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who waits may have a long prefix on the host, which is worth nothing without its keys."""
    rig = make_rig(**POOL, always_host=True)
    rig.add("before", WARM[0], max_tokens=16)
    rig.run()
    start(rig, "cold", COLD)
    start(rig, "keyless", WARM[0])
    coordinator = rig.coordinator
    keyless = rig.scheduler.requests["keyless"]
    assert all(coordinator.host_pool.host_block(h) for h in keyless.block_hashes[:9])
    pool = coordinator.pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))  # others have used every block since
    looked_up: list[Any] = []
    find = coordinator.host_pool.get_cached_block
    monkeypatch.setattr(
        coordinator.host_pool, "get_cached_block", lambda *args: (looked_up.append(args), find(*args))[1]
    )
    assert rig.scheduler.connector._queue._find_warm() is None
    assert len(looked_up) < 6  # of 12 pages, and of the cold one's
    monkeypatch.undo()
    rig.run()
