"""Every metric the plugin exports, as data, and how vLLM carries them from workers and scheduler to
Prometheus and the log.

Every series exists from the start, at 0: an increase from nothing to 1 is invisible to Prometheus.

A sample is `{key: {label value: number, or list of observations}}`; metrics without a label of their own use
"".
"""

import collections
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["METRICS", "HiSparsePromMetrics", "HiSparseStats", "Metric", "Sample"]

Sample = dict[str, dict[str, Any]]
# Values of labels; a test holds them to what the scheduler counts.
RESIDENCIES = ("full", "mixed", "none")
STATES = (
    "dirty",
    "spilling",
    "enqueued",
    "draining",
    "landing",
    "clean",
    "loose",
    "host",
    "restoring",
    "importing",
    "importing_host",
)
PAGE_EVENTS = (
    "spilled",
    "restored",
    "unpinned",
    "repinned",
    "evicted",
    "lost",
    "failed",
    "deduplicated",
    "host_hits",
    "device_hits",
    "imported",
    "lent",
)
REGION_EVENTS = ("granted", "returned", "grown_blocks", "shrunk_blocks")
IMPORT_EVENTS = ("device", "host", "arrived", "failed", "cancelled")
LEVELS = ("below_low", "between", "above_high")
# Rates of the log line, of bytes.
RATES = (
    (("host_read_bytes", "prefill_read_bytes"), "host reads GB/s"),
    (("spilled_bytes", "restored_bytes"), "page copies GB/s"),
)
MIN_INTERVAL_S = 0.001  # an interval may consist of one sample
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class Metric:
    """One exported metric: `vllm:hisparse_<key>`, with vLLM's labels and at most one of its own."""

    key: str
    kind: type  # Counter, Gauge or Histogram
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()  # of the label; none for `rank`, which has one a rank

    @property
    def name(self) -> str:
        """Name as registered; Prometheus appends `_total` to counters."""
        return f"vllm:hisparse_{self.key}"


METRICS = (
    # From every rank's resolver and copies.
    Metric("hits", Counter, "Selected rows of host-only pages found in the hot region.", "rank"),
    Metric("misses", Counter, "Selected rows of host-only pages that had to be read from the host.", "rank"),
    Metric("resident_rows", Counter, "Selected rows served from resident pages.", "rank"),
    Metric(
        "unreadable_rows",
        Counter,
        "Selected rows without a readable copy. Anything above 0 is a fault.",
        "rank",
    ),
    Metric(
        "overflowed_rows", Counter, "Selected rows that found no slot. Anything above 0 is a fault.", "rank"
    ),
    Metric("host_read_bytes", Counter, "Bytes of missing rows read from the host pool.", "rank"),
    Metric(
        "prefill_read_bytes",
        Counter,
        "Bytes of pages that prefills over host-backed context read from the host pool.",
        "rank",
    ),
    Metric(
        "spilled_bytes",
        Counter,
        "Bytes of pages copied to the host pool, by the first of the ranks that share it.",
        "rank",
    ),
    Metric("restored_bytes", Counter, "Bytes of pages copied back to the device pool.", "rank"),
    # From the scheduler.
    Metric("requests", Gauge, "Requests that hold blocks, by residency.", "residency", RESIDENCIES),
    Metric("pages", Gauge, "Pages of those requests, by state.", "state", STATES),
    Metric("hot_rows", Gauge, "Slots of all leased hot regions."),
    Metric("free_device_blocks", Gauge, "Free blocks of the device pool; loose pages count as free."),
    Metric("used_host_blocks", Gauge, "Host blocks leased by requests or copies in flight."),
    Metric("cached_host_blocks", Gauge, "Host blocks that hold a published page, leased or not."),
    Metric("host_run_blocks", Gauge, "Mean run of consecutive host blocks, of all pages spilled so far."),
    Metric("transfers_in_flight", Gauge, "Transfers that not every rank has completed."),
    Metric("page_events", Counter, "What happened to pages.", "event", PAGE_EVENTS),
    Metric("host_evictions", Counter, "Published host pages evicted to make room."),
    Metric(
        "region_events",
        Counter,
        "Hot regions granted and returned; blocks grown and shrunk.",
        "event",
        REGION_EVENTS,
    ),
    Metric(
        "imports",
        Counter,
        "Prompts computed by another engine: admitted, by where their pages land, and how that ended.",
        "event",
        IMPORT_EVENTS,
    ),
    Metric(
        "watermark_crossings",
        Counter,
        "Times the free-block level moved across a watermark.",
        "into",
        LEVELS,
    ),
    Metric(
        "waits_for_copies",
        Counter,
        "Times a request waited for copies in flight instead of preempting another.",
    ),
    Metric(
        "requests_passed",
        Counter,
        "Requests on a kept prefix that were admitted before earlier ones, whose prefill costs prefixes.",
    ),
    Metric(
        "spill_seconds", Histogram, "From planning a transfer to the host until every rank has completed it."
    ),
    Metric(
        "restore_seconds",
        Histogram,
        "From planning a transfer to the device until every rank has completed it.",
    ),
)
_BY_KEY = {metric.key: metric for metric in METRICS}


@dataclass
class HiSparseStats(KVConnectorStats):
    """Samples of one interval. Counters hold deltas, gauges the latest value, histograms all observations."""

    data: Sample = field(default_factory=dict)
    started: float = field(default_factory=lambda: time.monotonic())  # noqa: PLW0108 tests have a clock of their own

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was sampled."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's, or a later step's, sample."""
        for key, values in other.data.items():
            mine = self.data.setdefault(key, {})
            for label, value in values.items():
                mine[label] = _merged(_BY_KEY[key].kind, mine.get(label), value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The interval in a few figures, for vLLM's log line.

        Rates are of the rank that moved most: every rank has a link of its own.
        """
        seconds = max(time.monotonic() - self.started, MIN_INTERVAL_S)
        figures: dict[str, int | float] = {
            f"HiSparse {state} requests": int(n) for state, n in self.data.get("requests", {}).items()
        }
        hits, misses = _total(self.data, "hits"), _total(self.data, "misses")
        if hits + misses:
            figures["hit rate %"] = round(100 * hits / (hits + misses), 1)
        for keys, text in RATES:
            moved = collections.Counter[str]()
            for key in keys:
                moved.update(self.data.get(key, {}))
            figures[text] = round(max(moved.values(), default=0) / seconds / 1e9, 3)
        if spills := self.data.get("spill_seconds", {}).get(""):
            figures["spill ms"] = round(1000 * sum(spills) / len(spills), 2)
        for key, text in (("waits_for_copies", "waits for copies"), ("free_device_blocks", "free blocks")):
            if key in self.data:
                figures[text] = int(_total(self.data, key))
        return figures


class HiSparsePromMetrics(KVConnectorPromMetrics):
    """Registers `METRICS` with vLLM's labels and feeds them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {}
        ranks = tuple(map(str, range(vllm_config.parallel_config.world_size)))
        for metric in METRICS:
            extra: dict[str, Any] = {"buckets": SECONDS} if metric.kind is Histogram else {}
            if metric.kind is Gauge:
                extra["multiprocess_mode"] = "mostrecent"
            names = [*labelnames, *([metric.label] if metric.label else [])]
            self._metrics[metric.key] = metric_types[metric.kind](
                name=metric.name, documentation=metric.help, labelnames=names, **extra
            )
            for engine in per_engine_labelvalues:
                for label in metric.values or (ranks if metric.label else ("",)):
                    self._series(metric.key, label, engine)

    def observe(self, transfer_stats_data: Sample, engine_idx: int = 0) -> None:
        """Record one sample of an engine."""
        for key, values in transfer_stats_data.items():
            for label, value in values.items():
                _record(_BY_KEY[key].kind, self._series(key, label, engine_idx), value)

    def _series(self, key: str, label: str, engine: int) -> Any:
        """One series of a metric, made at its first use."""
        own = [label] if _BY_KEY[key].label else []
        return self._metrics[key].labels(*self.per_engine_labelvalues[engine], *own)


def _merged(kind: type, mine: Any, other: Any) -> Any:
    if kind is Gauge or mine is None:
        return other
    return mine + other  # numbers add up, lists of observations follow each other


def _record(kind: type, child: Any, value: Any) -> None:
    if kind is Counter:
        child.inc(value)
    elif kind is Gauge:
        child.set(value)
    else:
        for observation in value:
            child.observe(observation)


def _total(sample: Sample, key: str) -> float:
    return sum(sample.get(key, {}).values())
