"""Which pages leave the device: the coldest that the workers report, or all with the option `always_host`."""

from typing import Any

from vllm_hisparse.messages import Acknowledgement
from vllm_hisparse.scheduler.residency import PageState, Residency
from vllm_hisparse.testing.scheduler import SchedulerRig

POOL = {"num_device_blocks": 41, "low": 0.2, "high": 0.5}
AWAY = (PageState.LOOSE, PageState.HOST)


def pages_away(rig: SchedulerRig, request_id: str) -> list[int]:
    return rig.coordinator.records[request_id].pages.pages_in(*AWAY)


def decode_until_short(rig: SchedulerRig, hot_pages: list[int]) -> None:
    """Prefill 60 tokens, report `hot_pages`, and decode to page 16, which leaves too few blocks."""
    rig.add("a", range(60), max_tokens=20)
    for _ in range(4):
        rig.submit()
        rig.collect()
    record = rig.coordinator.records["a"]
    if hot_pages:
        rig.coordinator.acknowledge(Acknowledgement(heat={record.slot: hot_pages}))
    for _ in range(5):
        rig.submit()
        rig.collect()


def test_without_heat_pages_leave_from_the_tail(make_rig: Any) -> None:
    rig = make_rig(**POOL)
    decode_until_short(rig, [])
    assert pages_away(rig, "a") == [11, 12, 13, 14]
    rig.run()


def test_hot_pages_stay(make_rig: Any) -> None:
    rig = make_rig(**POOL)
    decode_until_short(rig, [14, 12, 3])
    assert pages_away(rig, "a") == [9, 10, 11, 13]
    rig.run()


def test_when_all_are_hot_the_coldest_of_them_leave(make_rig: Any) -> None:
    rig = make_rig(**POOL)
    decode_until_short(rig, [14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 0, 1, 2, 3])
    assert pages_away(rig, "a") == [0, 1, 2, 3]
    rig.run()


def test_always_host_keeps_only_the_page_that_is_written(make_rig: Any) -> None:
    """The pool could hold three times as much; the rig reads all content back after every step."""
    rig = make_rig(num_device_blocks=201, always_host=True)
    rig.add("a", range(30), max_tokens=20)
    rig.add("b", range(100, 140), max_tokens=12)
    seen = set()
    while rig.scheduler.has_requests() or rig.in_flight:
        rig.step()
        for request_id, record in rig.coordinator.records.items():
            if record.request.num_output_tokens > 4:
                seen.add(request_id)
                on_device = len(record.pages) - len(pages_away(rig, request_id))
                assert on_device <= 3, "the newest page, one that is being copied, one that has been copied"
                assert record.pages.residency is not Residency.FULL
                assert record.region is not None
    assert seen == {"a", "b"}
    assert rig.coordinator.leases.counters.evicted > 15
    rig.run()


def test_always_host_without_room_for_a_region_keeps_pages(make_rig: Any) -> None:
    rig = make_rig(num_device_blocks=41, always_host=True, low=0.0, high=0.5)
    for name in "abcd":
        first = ord(name) * 100
        rig.add(name, range(first, first + 24), max_tokens=10)
    rig.run()
    assert all(len(tokens) == 10 for tokens in rig.outputs.values())
