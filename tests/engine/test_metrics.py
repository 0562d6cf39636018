"""Every exported metric is exactly what a second account of the same run comes to."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics import reader

from tests.engine.observed import TICK_S, Watcher
from tests.engine.replayed import Recorder, replay
from tests.engine.workload import ENGINE_ARGS, ModelPath, prompts
from vllm_hisparse.messages import StepMessage, decode, encode
from vllm_hisparse.metrics import METRICS, SECONDS, Sample
from vllm_hisparse.scheduler.coordinator import HiSparseCoordinator
from vllm_hisparse.scheduler.residency import PageState
from vllm_hisparse.testing.harness import HiSparseEngine, LateCopies, Prompt, hisparse, hisparse_engine
from vllm_hisparse.testing.models import TinyModel

pytestmark = pytest.mark.engine

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
MODEL = TinyModel(index_pattern="FSF", index_topk=32)
ITEM = 2  # bytes of a bf16 element
NAME = "vllm:hisparse_"
METRIC = {metric.key: metric for metric in METRICS}
INTERVAL_STEPS = 40
LINE = {
    *(f"HiSparse {residency} requests" for residency in METRIC["requests"].values),
    "hit rate %",
    "host reads GB/s",
    "page copies GB/s",
    "spill ms",
    "waits for copies",
    "free blocks",
}
FAULTS = {"unreadable_rows", "overflowed_rows"}


def documented() -> dict[str, tuple[str, str]]:
    """Metrics of docs/metrics.md: name without prefix -> (type, own label)."""
    rows = re.findall(rf"^\| `{NAME}(\w+)` \| (\w+) \| (\w*) \|", DOCUMENT.read_text(), re.MULTILINE)
    return {name: (kind, label) for name, kind, label in rows}


def exported(engine: HiSparseEngine) -> dict[str, dict[str, Any]]:
    """What Prometheus has: name -> own label's value -> number, or (count, sum, buckets) of a histogram."""
    metrics = engine.llm.get_metrics()
    (theirs,) = (m.labels for m in metrics if m.name == "vllm:num_preemptions")
    found: dict[str, dict[str, Any]] = {}
    for metric in metrics:
        if not metric.name.startswith(NAME):
            continue
        assert theirs.items() <= metric.labels.items(), "vLLM's own labels"
        (own,) = [v for k, v in metric.labels.items() if k not in theirs] or [""]
        values = found.setdefault(metric.name.removeprefix(NAME), {})
        if isinstance(metric, reader.Histogram):
            values[own] = metric.count, metric.sum, metric.buckets
        else:
            assert isinstance(metric, (reader.Counter, reader.Gauge))
            values[own] = metric.value
    return found


def as_histogram(seconds: list[float]) -> tuple[int, Any, dict[str, int]]:
    """What a histogram of these observations has to show."""
    buckets = {str(bound): sum(s <= bound for s in seconds) for bound in (*SECONDS, float("inf"))}
    return (
        len(seconds),
        pytest.approx(sum(seconds)),
        {k.replace("inf", "+Inf"): n for k, n in buckets.items()},
    )


class Run:
    """An engine that is followed from its start by both accounts."""

    def __init__(self, engine: HiSparseEngine, patch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.watcher = Watcher(engine, patch)
        self.recorder = Recorder(engine, patch)
        self.seen: set[tuple[str, str]] = set()  # (metric, label) that were not 0 at some time
        self.lines: list[str] = []  # of the log, one an interval
        self._known: dict[str, dict[str, Any]] = {}  # what the samples so far add up to
        self._kinds = documented()
        log = KVConnectorLogging.log
        patch.setattr(KVConnectorLogging, "log", lambda logging, log_fn: log(logging, self._log))
        sampler = engine.scheduler.connector._sampler
        sampler._interval_s = 0.0  # a sample every step
        sample = sampler.sample
        patch.setattr(sampler, "sample", lambda: self._check(sample()))

    def tick(self) -> None:
        """A step has ended; the log is due now and then."""
        self.watcher.now += TICK_S
        if self.engine.num_steps % INTERVAL_STEPS == 0:
            self.engine.llm.llm_engine.do_log_stats()

    def _log(self, text: str, *arguments: Any) -> None:
        self.lines.append(text % arguments)

    def _check(self, sample: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """A sample of the scheduler as it is taken, against what it has to say by then."""
        for name, expected in self.watcher.expected().items():
            known = self._known.setdefault(name, {})
            for label, value in sample.get(name, {}).items():
                is_new = label not in known or self._kinds[name][0] == "gauge"
                known[label] = value if is_new else known[label] + value
            nothing: Any = [] if self._kinds[name][0] == "histogram" else 0
            labels = METRIC[name].values or ("",)
            assert set(known) <= set(labels)
            for label in labels:
                value = known.get(label, nothing)
                assert value == expected.get(label, nothing), (name, label, self.engine.num_steps)
                self.seen |= {(name, label)} if value else set()
        return sample

    def check_exported(self) -> dict[str, dict[str, Any]]:
        """Prometheus against both accounts. Returns what it has."""
        rank = replay(self.recorder, self.engine, MODEL, ITEM)
        expected: Sample = self.watcher.expected() | {name: {"0": value} for name, value in rank.items()}
        found = exported(self.engine)
        assert set(expected) == set(self._kinds), "the document's metrics each have a reference, and no other"
        for name, (kind, own) in self._kinds.items():
            labels = {"0"} if own == "rank" else set(METRIC[name].values) or {""}
            assert set(found[name]) == labels, (name, "every series, and no other")
            for label in labels:
                value = expected[name].get(label, 0)
                if kind == "histogram":
                    assert found[name][label] == as_histogram(value), name
                else:
                    assert found[name][label] == pytest.approx(value, rel=1e-12), (name, label)
        self.seen |= {(name, label) for name, values in found.items() for label, v in values.items() if v}
        return found


@contextmanager
def followed(
    model_path: ModelPath, patch: pytest.MonkeyPatch, copies: LateCopies, **options: Any
) -> Iterator[Run]:
    """An engine under pressure."""
    arguments = {"dtype": "bfloat16", "num_gpu_blocks_override": 26, **ENGINE_ARGS}
    with hisparse_engine(model_path(MODEL), **arguments, kv_transfer_config=hisparse(**options)) as engine:
        engine.use_copies(copies)
        yield Run(engine, patch)


def run(
    following: Run, requests: list[Prompt], each_step: Callable[[], None] = lambda: None
) -> dict[str, dict[str, Any]]:
    """Requests to their ends, then idle steps to the end of every transfer; then what Prometheus has."""
    engine = following.engine

    def after_step() -> None:
        following.tick()
        each_step()

    engine.run(requests, each_step=after_step)
    while engine.scheduler.has_requests() or engine.core.batch_queue:
        engine.step()
        following.tick()
    return following.check_exported()


def calm(coordinator: HiSparseCoordinator) -> None:
    """The pressure falls as soon as a page is loose: it is pinned again before its blocks are reused."""
    pressure, config = coordinator.pressure, coordinator.config
    num_blocks = coordinator.pool.num_gpu_blocks
    if any(record.pages.count(PageState.LOOSE) for record in coordinator.records.values()):
        pressure.low = pressure.high = 0
    else:
        pressure.low, pressure.high = config.low_blocks(num_blocks), config.high_blocks(num_blocks)


def test_pages_that_leave_and_return(model_path: ModelPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that end late, regions that grow and shrink, waits, a host pool too small for everything."""
    twin = Prompt(prompts()[8].token_ids[:250], 80)  # two of them publish the same pages at the same time
    options = {"low_watermark": 0.08, "high_watermark": 0.12, "max_hot_rows": 256, "host_pool_gib": 0.0006}
    with followed(model_path, monkeypatch, LateCopies(6), **options) as following:
        run(following, prompts((60, 20), count=6))
        run(following, [twin, twin, *prompts(8, count=2)])
        run(following, prompts((60, 20), count=6), partial(calm, following.engine.coordinator))
        following.engine.finish()
    assert len(following.lines) >= following.engine.num_steps // INTERVAL_STEPS  # vLLM's own intervals, too
    shown = [dict(part.split("=") for part in line.split(": ")[1].split(", ")) for line in following.lines]
    assert {key for line in shown for key in line} == LINE
    assert all(LINE - {"hit rate %", "spill ms"} <= set(line) for line in shown)
    not_seen = {(m.key, v) for m in METRICS for v in m.values or ("0" if m.label else "",)} - following.seen
    # A request that runs has the page on the device that it writes: None ends as it is scheduled. Copies that
    # fail: test_faults.py. Pages from other engines: test_nixl.py, scheduler/test_imports.py. Requests
    # that pass others: scheduler/test_queueing.py.
    only_elsewhere = {
        ("requests_passed", ""),
        ("page_events", "evicted"),
        ("page_events", "failed"),
        ("requests", "none"),
    }
    only_elsewhere |= {("page_events", event) for event in ("imported", "lent")}
    only_elsewhere |= {("pages", state) for state in ("importing", "importing_host")}
    only_elsewhere |= {("imports", value) for value in METRIC["imports"].values}
    assert not_seen == {*((name, "0") for name in FAULTS), *only_elsewhere}


def spoiled(message: StepMessage) -> StepMessage:
    """Hides the host copy of second pages and two thirds of the slots of every region."""
    pages = [w._replace(host_block=-1) if w.page == 1 else w for w in message.pages]
    regions = [w._replace(num_rows=min(w.num_rows, MODEL.index_topk // 3)) for w in message.regions]
    return msgspec.structs.replace(message, pages=tuple(pages), regions=tuple(regions))


def test_rows_that_are_lost(model_path: ModelPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are spoiled on the way: the metrics of faults count what becomes of it."""
    with followed(model_path, monkeypatch, LateCopies(1), always_host=True) as following:
        begin_step = following.engine.worker.begin_step
        monkeypatch.setattr(
            following.engine.worker,
            "begin_step",
            lambda payload, *args: begin_step(encode(spoiled(decode(payload))), *args),
        )
        found = run(following, prompts(16, count=4))
    assert all(found[name]["0"] > 0 for name in FAULTS)
    assert found["page_events"]["evicted"] > 0
