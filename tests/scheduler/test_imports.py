"""Prompts that another engine has computed: where they land, and that nothing is lost whatever happens.

The rig's transfers scribble over all that they may write until they end (`testing/borrowing.py`).
"""

import time
from typing import Any

import pytest

from vllm_hisparse.scheduler.landing import Landing
from vllm_hisparse.scheduler.residency import PageState, Residency
from vllm_hisparse.testing.borrowing import transfer_params
from vllm_hisparse.testing.scheduler import SchedulerRig

CONSUMER = {"nixl_role": "kv_consumer", "low": 0.1, "high": 0.3}
TIGHT = {**CONSUMER, "num_device_blocks": 34, "max_model_len": 96}
REMOTE = "WAITING_FOR_REMOTE_KVS"


def borrow(rig: SchedulerRig, request_id: str, prompt: range, max_tokens: int = 4, **options: Any) -> Any:
    """Add a request whose prompt a producer has."""
    params = transfer_params(len(prompt), rig.options.page_tokens, **{"theirs": f"p-{request_id}", **options})
    return rig.add(request_id, prompt, max_tokens, params)


def states(rig: SchedulerRig, request_id: str) -> list[PageState]:
    record = rig.coordinator.records[request_id]
    return [record.pages[page] for page in range(len(record.pages))]


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("length", [40, 41, 43])
def test_on_the_device_if_it_fits(make_rig: Any, length: int, num_ranks: int, num_parts: int) -> None:
    rig = make_rig(num_device_blocks=120, num_parts=num_parts, num_ranks=num_ranks, **CONSUMER)
    request = borrow(rig, "a", range(length))
    rig.step()
    assert request.status.name == REMOTE
    assert states(rig, "a") == [PageState.IMPORTING] * -(-length // 4)
    job = rig.borrowing.jobs["a"]
    assert [page.host_block for page in job.pages] == [-1] * len(job.pages)
    assert job.staging == ()
    rig.deliver("a")
    rig.run()
    assert len(rig.outputs["a"]) == 4
    counters = rig.coordinator.imports.counters
    assert (counters.device, counters.host, counters.arrived) == (1, 0, 1)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("length", [64, 65, 67])
def test_on_the_host_if_not(make_rig: Any, length: int, num_ranks: int, num_parts: int) -> None:
    """All pages but the last, which the request goes on writing; they pass through the hot region."""
    rig = make_rig(
        **{**TIGHT, "num_device_blocks": 21 + 13 * num_parts}, num_parts=num_parts, num_ranks=num_ranks
    )
    borrow(rig, "a", range(length), max_tokens=12)
    rig.step()
    record = rig.coordinator.records["a"]
    num_pages = -(-length // 4)
    assert states(rig, "a") == [PageState.IMPORTING_HOST] * (num_pages - 1) + [PageState.IMPORTING]
    assert record.pages.residency is Residency.MIXED
    job = rig.borrowing.jobs["a"]
    region = {block for part in record.region.block_ids for block in part}
    assert {block for place in job.staging for block in place} == region
    assert [bool(page.device_blocks) for page in job.pages] == [False] * (num_pages - 1) + [True]
    for _ in range(3):
        rig.step()
    rig.deliver("a")
    rig.step()
    assert states(rig, "a")[: num_pages - 1] == [PageState.HOST] * (num_pages - 1)
    rig.run()
    assert len(rig.outputs["a"]) == 12
    assert rig.coordinator.imports.counters.host == 1


def test_prompt_of_32019_tokens(make_rig: Any) -> None:
    """501 pages of 64 tokens, the last with 19: more than the device pool, exactly what the host needs."""
    rig = make_rig(
        page_tokens=64,
        max_model_len=32_768,
        max_step_tokens=2048,
        num_device_blocks=600,
        num_host_blocks=520,
        hot_rows=512,
        max_hot_rows=512,
        top_k=256,
        **CONSUMER,
    )
    rig.watch_refusals = False
    borrow(rig, "a", range(32_019), max_tokens=3)
    rig.step()
    job = rig.borrowing.jobs["a"]
    assert (len(job.pages), len(job.keys)) == (501, 501)
    assert sum(not page.device_blocks for page in job.pages) == 500
    assert len(job.staging) == 8
    rig.run()
    assert len(rig.outputs["a"]) == 3


def test_the_page_in_use_is_on_the_device(make_rig: Any) -> None:
    """Also of a prompt that ends with a page: its last token is computed again."""
    rig = make_rig(**TIGHT)
    borrow(rig, "a", range(64))
    rig.step()
    assert rig.borrowing.jobs["a"].pages[-1].device_blocks
    rig.run()


def test_a_waiting_request_keeps_its_choice(make_rig: Any) -> None:
    rig = make_rig(**{**TIGHT, "num_device_blocks": 60, "num_host_blocks": 26, "max_requests": 4})
    rig.add("big", range(500, 570), max_tokens=20)
    while rig.coordinator.pool.get_num_free_blocks() > 26 and rig.scheduler.has_requests():
        rig.step()
    borrow(rig, "a", range(80))
    borrow(rig, "b", range(200, 280))
    rig.step()
    imports = rig.coordinator.imports
    assert imports["a"].landing is Landing.HOST
    assert "b" not in rig.coordinator.records  # the host has no room for both
    chosen = imports["b"].landing
    for _ in range(5):
        rig.step()
        assert imports["b"].landing is chosen
    rig.run()
    assert {len(rig.outputs[r]) for r in ("a", "b")} == {4}


def test_a_full_host_pool_is_waited_for(make_rig: Any) -> None:
    """Requests hold all host blocks; the import waits for them without holding anything, and then runs."""
    rig = make_rig(**{**TIGHT, "num_host_blocks": 26, "max_requests": 3})
    rig.add("a", range(300, 380), max_tokens=12)
    while rig.coordinator.host_pool.get_num_free_blocks() >= 19:
        rig.step()
    borrow(rig, "b", range(80))
    while "b" not in rig.coordinator.imports:  # steps are full with the prompt of the other
        rig.step()
    assert rig.coordinator.imports["b"].landing is Landing.HOST
    assert rig.num_refused > 0
    assert "b" not in rig.coordinator.records
    assert not rig.borrowing.jobs
    rig.run()
    assert (len(rig.outputs["a"]), len(rig.outputs["b"])) == (12, 4)


@pytest.mark.parametrize("blocks", [34, 120], ids=["host", "device"])
def test_abort_during_the_transfer(make_rig: Any, blocks: int) -> None:
    """Blocks stay leased until the transfer has ended, and nothing that arrived is used."""
    rig = make_rig(**{**TIGHT, "num_device_blocks": blocks})
    borrow(rig, "a", range(80))
    rig.step()
    leased = rig.coordinator.pool.get_num_free_blocks(), rig.coordinator.host_pool.get_num_free_blocks()
    rig.abort("a")
    rig.add("b", range(300, 330), max_tokens=6)
    for _ in range(4):
        rig.step()
    assert "a" in rig.borrowing.cancelled
    assert rig.coordinator.host_pool.get_num_free_blocks() <= leased[1]
    assert states(rig, "a")[0] in (PageState.IMPORTING, PageState.IMPORTING_HOST)
    rig.run()
    assert rig.coordinator.imports.counters.cancelled == 1
    assert rig.coordinator.imports.counters.arrived == 0


def test_abort_of_a_request_that_was_never_admitted(make_rig: Any) -> None:
    rig = make_rig(**{**TIGHT, "max_requests": 1})
    rig.add("a", range(300, 340), max_tokens=6)
    rig.step()
    borrow(rig, "b", range(80))
    rig.abort("b")
    rig.run()
    assert rig.borrowing.released == ["b"]
    assert "b" not in rig.coordinator.imports


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("blocks", [34, 120], ids=["host", "device"])
def test_a_failed_transfer(make_rig: Any, blocks: int, policy: str) -> None:
    """Everything is given back; the prompt is computed here, or the request fails, as vLLM is told."""
    rig = make_rig(**{**TIGHT, "num_device_blocks": blocks, "load_failure_policy": policy})
    borrow(rig, "a", range(80))
    rig.step()
    rig.deliver("a", failed=True)
    rig.run()
    assert len(rig.outputs["a"]) == (4 if policy == "recompute" else 0)
    counters = rig.coordinator.imports.counters
    assert (counters.failed, counters.arrived, counters.cancelled) == (1, 0, 0)


def test_pages_in_the_producers_host_pool_land_in_ours(make_rig: Any) -> None:
    """Whatever the landing is; those on the producer's device still go to the device."""
    rig = make_rig(num_device_blocks=120, **CONSUMER)
    borrow(rig, "a", range(42), host_pages=[1, 2, 10])
    rig.step()
    on_host = [p for p, state in enumerate(states(rig, "a")) if state is PageState.IMPORTING_HOST]
    assert on_host == [1, 2]
    rig.run()
    assert len(rig.outputs["a"]) == 4


def test_a_prefix_hit_is_not_imported_again(make_rig: Any) -> None:
    rig = make_rig(**{**TIGHT, "num_device_blocks": 40})
    borrow(rig, "a", range(80))
    rig.run()
    borrow(rig, "b", range(80))
    borrow(rig, "c", range(72))
    rig.step()
    jobs = rig.borrowing.jobs
    assert min(page.page for job in jobs.values() for page in job.pages) >= 10
    rig.run()
    assert len(rig.outputs["b"]) == len(rig.outputs["c"]) == 4


def test_imported_host_pages_are_found_by_others(make_rig: Any) -> None:
    rig = make_rig(**TIGHT)
    borrow(rig, "a", range(80))
    rig.run()
    assert rig.coordinator.host_pool.num_published >= 19


def test_reset_during_the_transfer_publishes_nothing(make_rig: Any) -> None:
    rig = make_rig(**TIGHT)
    borrow(rig, "a", range(80))
    rig.step()
    epoch = rig.coordinator.host_pool.epoch
    rig.coordinator.host_pool.epoch += 1  # as by a reset, which vLLM refuses while blocks are leased
    assert not rig.reset(running=False)
    rig.deliver("a")
    rig.step()
    assert rig.coordinator.host_pool.num_published == 0
    assert rig.coordinator.host_pool.epoch == epoch + 1
    rig.run()


def test_requests_under_way_go_on_while_imports_wait(make_rig: Any) -> None:
    """Under pressure, with regions that shrink: never that of an import."""
    rig = make_rig(
        **{**TIGHT, "num_device_blocks": 50, "max_hot_rows": 32, "hot_rows": 16, "max_requests": 4}
    )
    borrow(rig, "a", range(70), max_tokens=6)
    rig.step()
    rig.add("b", range(300, 350), max_tokens=20)
    rig.add("c", range(400, 440), max_tokens=20)
    for _ in range(12):
        rig.num_misses = 50
        rig.step()
    rig.run()
    assert {r: len(out) for r, out in rig.outputs.items()} == {"a": 6, "b": 20, "c": 20}


def test_the_producer_hears_of_waiting_requests(make_rig: Any) -> None:
    """Or its lease on their pages would end."""
    rig = make_rig(**{**TIGHT, "max_requests": 1})
    rig.add("a", range(300, 320), max_tokens=6)
    rig.step()
    borrow(rig, "b", range(80))
    rig.step()
    ((peer, requests),) = rig.borrowing.heartbeats
    assert (peer.engine_id, requests) == ("producer", ("p-b",))
    rig.run()


def test_how_long_the_pages_are_there_is_told_to_the_workers(make_rig: Any) -> None:
    """Since when this engine has known of the request, which may wait for long."""
    rig = make_rig(**{**TIGHT, "max_requests": 1})
    rig.add("a", range(300, 320), max_tokens=6)
    rig.step()
    borrow(rig, "b", range(80))
    time.sleep(0.1)
    while "b" not in rig.borrowing.jobs:
        rig.step()
    assert rig.borrowing.jobs["b"].age_s >= 0.1
    rig.run()


def test_pages_are_read_once(make_rig: Any) -> None:
    """Of two requests with the same parameters (several answers, a client that tries again), whenever they
    come, one reads; the producer does not hear of the others, or it would free pages that are being read.
    """
    rig = make_rig(num_device_blocks=150, **CONSUMER)
    for name in "abc":
        borrow(rig, name, range(80), theirs="one")
    rig.step()
    (reader,) = rig.borrowing.jobs
    rig.abort(next(name for name in "abc" if name != reader))
    rig.run()
    borrow(rig, "later", range(80), theirs="one")
    rig.run()
    assert rig.borrowing.released == []
    assert rig.coordinator.imports.counters.arrived == 1
    assert len(rig.outputs[reader]) == len(rig.outputs["later"]) == 4


@pytest.mark.parametrize(
    "damage", [{"remote_block_ids": None}, {"remote_block_ids": [[1, 2]]}, {"pp_size": 2}, {"tp_size": None}]
)
def test_what_cannot_be_imported_is_computed(make_rig: Any, damage: dict[str, Any]) -> None:
    rig = make_rig(**TIGHT)
    rig.add("a", range(80), 4, {**transfer_params(80, 4), **damage})
    rig.run()
    assert len(rig.outputs["a"]) == 4
    assert rig.coordinator.imports.counters.arrived == 0
