"""The interval's log line, and that labels have the values that the scheduler counts."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from dataclasses import fields

from vllm_hisparse import metrics
from vllm_hisparse.metrics import METRICS, HiSparseStats
from vllm_hisparse.scheduler.leases import PageCounters
from vllm_hisparse.scheduler.regions import RegionCounters
from vllm_hisparse.scheduler.residency import PageState, Residency


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def test_an_interval_in_one_line(clock: Any) -> None:
    """Counts add up, gauges are the latest, rates are those of the busiest rank."""
    stats = HiSparseStats({"requests": {"full": 2, "mixed": 1, "none": 0}, "waits_for_copies": {"": 1}})
    clock.now += 4
    first = {"0": 4_000_000_000, "1": 1_000_000_000}
    stats.aggregate(HiSparseStats({"host_read_bytes": first, "hits": {"0": 80}, "misses": {"0": 15}}))
    stats.aggregate(HiSparseStats({"spilled_bytes": {"0": 10**9}, "restored_bytes": {"0": 10**9, "1": 0}}))
    stats.aggregate(HiSparseStats({"host_read_bytes": {"1": 9_000_000_000}, "misses": {"1": 5}}))
    stats.aggregate(
        HiSparseStats(
            {
                "requests": {"full": 1, "mixed": 3, "none": 0},
                "spill_seconds": {"": [0.002, 0.004]},
                "waits_for_copies": {"": 2},
                "free_device_blocks": {"": 17},
            }
        )
    )
    clock.now += 6
    assert stats.reduce() == {
        "HiSparse full requests": 1,
        "HiSparse mixed requests": 3,
        "HiSparse none requests": 0,
        "hit rate %": 80.0,
        "host reads GB/s": 1.0,
        "page copies GB/s": 0.2,
        "spill ms": 3.0,
        "waits for copies": 3,
        "free blocks": 17,
    }


def test_an_interval_without_events(clock: Any) -> None:
    """What was not measured is left out, and no time is no division by it."""
    assert HiSparseStats({"requests": {"full": 1}, "free_device_blocks": {"": 9}}).reduce() == {
        "HiSparse full requests": 1,
        "host reads GB/s": 0.0,
        "page copies GB/s": 0.0,
        "free blocks": 9,
    }


def test_values_of_labels() -> None:
    values = {metric.key: metric.values for metric in METRICS if metric.values}
    assert values["requests"] == tuple(residency.value for residency in Residency)
    assert values["pages"] == tuple(state.name.lower() for state in PageState)
    assert values["page_events"] == tuple(field.name for field in fields(PageCounters))
    assert values["region_events"] == tuple(field.name for field in fields(RegionCounters))
