"""The scheduler's part of the metrics."""

import time
from collections import Counter
from typing import TYPE_CHECKING

from vllm_hisparse.metrics import Sample

from .residency import PageState, Residency

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["SchedulerSampler"]

INTERVAL_S = 0.5  # gauges cost a pass over the requests, so not every step takes one


class SchedulerSampler:
    """Samples a coordinator at most every `interval_s`, and whenever its last request is gone."""

    def __init__(self, coordinator: "HiSparseCoordinator", interval_s: float = INTERVAL_S) -> None:
        self._coordinator = coordinator
        self._interval_s = interval_s
        self._next = 0.0
        self._seen: Sample = {}

    def sample(self) -> Sample | None:
        """Gauges, deltas of the counters and new latencies, or None if it is not time yet."""
        now = time.monotonic()
        if now < self._next and self._coordinator.records:
            return None
        self._next = now + self._interval_s
        return {**self._gauges(), **self._deltas(), **self._latencies()}

    def _gauges(self) -> Sample:
        coordinator = self._coordinator
        requests = dict.fromkeys((r.value for r in Residency), 0)
        pages: Counter[str] = Counter(dict.fromkeys((s.name.lower() for s in PageState), 0))
        for record in coordinator.records.values():
            requests[record.pages.residency.value] += 1
            for state in PageState:
                pages[state.name.lower()] += record.pages.count(state)
        host = coordinator.host_pool
        return {
            "requests": requests,
            "pages": dict(pages),
            "hot_rows": {"": coordinator.regions.num_leased_rows},
            "free_device_blocks": {"": coordinator.pool.get_num_free_blocks()},
            "used_host_blocks": {"": host.num_gpu_blocks - 1 - host.get_num_free_blocks()},
            "cached_host_blocks": {"": host.num_published},
            "host_run_blocks": {"": coordinator.leases.extents.mean_run},
            "transfers_in_flight": {"": len(coordinator.ledger)},
        }

    def _deltas(self) -> Sample:
        coordinator = self._coordinator
        totals: Sample = {
            "page_events": vars(coordinator.leases.counters),
            "host_evictions": {"": coordinator.host_pool.num_evictions},
            "region_events": vars(coordinator.regions.counters),
            "imports": vars(coordinator.imports.counters),
            "watermark_crossings": coordinator.pressure.num_crossings,
            "waits_for_copies": {"": coordinator.num_waits},
            "requests_passed": {"": coordinator.num_passed},
        }
        seen, self._seen = self._seen, {key: dict(values) for key, values in totals.items()}
        return {
            key: {label: value - seen.get(key, {}).get(label, 0) for label, value in values.items()}
            for key, values in totals.items()
        }

    def _latencies(self) -> Sample:
        latencies = self._coordinator.ledger.take_latencies()
        return {key: {"": seconds} for key, seconds in latencies.items() if seconds}
