"""Beside vLLM's OffloadingConnector, which keeps indexer keys: the keys that the device has lost come back
from there, for pages that the host pool has. Outputs are those of an engine without connectors.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.null_connector import beside_null_connector
from tests.engine.workload import ENGINE_ARGS, ModelPath, Reference, differences, prompts
from vllm_hisparse.compat import offloading as compat
from vllm_hisparse.config import MIB
from vllm_hisparse.testing.engine import counters
from vllm_hisparse.testing.harness import HiSparseEngine, LateCopies, hisparse, hisparse_engine, leaves, multi
from vllm_hisparse.testing.models import SEPARATE, TinyModel
from vllm_hisparse.testing.offloading import HostOffloadingWorker, offloading

pytestmark = pytest.mark.engine

DTYPE = "bfloat16"
PAIRS = TinyModel(index_pattern="FSFS")
LENGTHS = (24, 16, 20, 12)
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"


@dataclass
class Recorder:
    """What the scheduler publishes and reports."""

    events: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # (kind, medium, KV group)
    stats: list[dict[str, Any]] = field(default_factory=list)

    def publish(self, batch: Any) -> None:
        self.events.update((type(e).__name__, e.medium, e.group_idx) for e in batch.events)

    def shutdown(self) -> None:
        pass

    def attach(self, engine: HiSparseEngine) -> None:
        engine.scheduler.kv_event_publisher = self
        make_stats = engine.scheduler.make_stats

        def recorded(*args: Any, **kwargs: Any) -> Any:
            stats = make_stats(*args, **kwargs)
            if stats is not None and stats.kv_connector_stats:
                self.stats.append(stats.kv_connector_stats)
            return stats

        engine.scheduler.make_stats = recorded


@contextmanager
def offloading_engine(
    model_path: ModelPath, transfer: dict[str, Any], model: TinyModel = SEPARATE, **engine_args: Any
) -> Iterator[HiSparseEngine]:
    args = {"dtype": DTYPE, "num_gpu_blocks_override": 24, **ENGINE_ARGS, **engine_args}
    with hisparse_engine(model_path(model), kv_transfer_config=transfer, **args) as engine:
        engine.use_copies(LateCopies(2))
        yield engine


def child(engine: HiSparseEngine) -> Any:
    """OffloadingConnector's scheduler side."""
    (found,) = (c for c in leaves(engine.scheduler.connector) if isinstance(c, compat.OffloadingConnector))
    return found.connector_scheduler


def finish(engine: HiSparseEngine) -> None:
    """Nothing is held by either connector any more."""
    engine.finish()
    scheduler = child(engine)
    assert not scheduler._jobs
    assert not scheduler._req_status
    assert not scheduler._block_id_to_pending_jobs
    assert not scheduler._chunks_being_loaded
    for name, value in scheduler.manager.get_stats().data["data"].items():
        assert not name.endswith("usage_perc") or not any(value.values()), (name, value)


def external_hits(engine: HiSparseEngine) -> float:
    """Tokens whose keys were loaded, since start."""
    return counters(engine.llm)[EXTERNAL_HITS]


def test_same_bits_nested_with_events_and_metrics(model_path: ModelPath, reference: Reference) -> None:
    """Two levels of MultiConnector. The second round starts on both tiers' pages and on loaded keys."""
    expected = reference(SEPARATE, DTYPE)
    recorder = Recorder()
    with offloading_engine(
        model_path,
        beside_null_connector(multi(hisparse(), offloading())),
        attention_config={"hisparse_config": {}},
        kv_events_config=EVENTS,
    ) as engine:
        recorder.attach(engine)
        completions = engine.run(prompts(LENGTHS), engine.check_integrity)
        finish(engine)
        first_hits, first_pages = external_hits(engine), dict(engine.pages)
        again = engine.run(prompts(LENGTHS), engine.check_integrity)
        finish(engine)
        assert external_hits(engine) > first_hits
        assert engine.pages["host_hits"] > first_pages["host_hits"]
        assert engine.pages["lost"] > 0
        counted = counters(engine.llm)
        check_log(engine, recorder.stats)
    assert differences(completions, expected) == []
    assert differences(again, expected) == []
    assert counted["vllm:hisparse_misses"] > 0
    assert counted["vllm:kv_offload_load_bytes"] > 0
    stored = {key[1:] for key in recorder.events if key[0] == "BlockStored"}
    assert stored == {
        ("GPU", 1),
        ("GPU", 2),
        ("CPU", 0),
        ("CPU", 1),
    }  # keys, pages; host pool, offloaded keys


def check_log(engine: HiSparseEngine, payloads: list[dict[str, Any]]) -> None:
    """vLLM's log line has both connectors' figures, summed over the steps."""
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    logging = KVConnectorLogging(engine.scheduler.vllm_config.kv_transfer_config)
    assert len(payloads) > 10
    for payload in payloads:
        logging.observe(payload)
    lines: list[str] = []
    logging.log(lambda text, *values: lines.append(text % values))
    (line,) = lines
    assert "hit rate %" in line
    assert "vllm:kv_offload_load_bytes" in line


def test_same_bits_with_three_pages_an_indexer_block(model_path: ModelPath, reference: Reference) -> None:
    """Two layers' keys, page by page, in blocks of 192 tokens: the connector saves their shares."""
    expected = reference(PAIRS, DTYPE)
    transfer = multi(hisparse(max_indexer_pages=None), offloading())
    with offloading_engine(model_path, transfer, PAIRS, num_gpu_blocks_override=18) as engine:
        assert engine.coordinator.layout.indexer_pages == 3
        assert len(engine.coordinator.layout.indexer_layers) == 2
        for _ in range(2):
            completions = engine.run(prompts(LENGTHS), engine.check_integrity)
            finish(engine)
            assert differences(completions, expected) == []
        assert external_hits(engine) > 0


def test_aborts_preemptions_evictions_and_a_reset(model_path: ModelPath, reference: Reference) -> None:
    """Requests go while their keys are being stored and loaded; the store is too small for all of them."""
    expected = reference(SEPARATE, DTYPE)
    store_mib = 0.3
    transfer = multi(hisparse(), offloading(store_mib, copy_delay=4, offload_prompt_only=False))
    with offloading_engine(model_path, transfer, async_scheduling=False) as engine:
        engine.run(prompts(LENGTHS), engine.check_integrity)
        finish(engine)
        index = run_with_aborts(engine)
        finish(engine)
        for request_id, i in index.items():
            assert differences([engine.completions[request_id]], [expected[i]]) == []

        request_ids = [engine.add(prompt) for prompt in prompts(LENGTHS)]
        for _ in range(6):
            engine.step()
        while engine.requests_in(RequestStatus.WAITING_FOR_REMOTE_KVS):
            engine.step()
        assert engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.check_integrity()
        assert engine.coordinator.host_pool.num_published == 0
        hits = external_hits(engine)
        engine.step()
        assert external_hits(engine) == hits, "keys from before the reset"
        engine.drain(engine.check_integrity)
        finish(engine)
        assert differences([engine.completions[r] for r in request_ids], expected) == []
        assert engine.num_preemptions > 0
        assert counters(engine.llm)["vllm:kv_offload_load_bytes"] > 0
        assert counters(engine.llm)["vllm:kv_offload_store_bytes"] > 3 * store_mib * MIB, "none was evicted"


def run_with_aborts(engine: HiSparseEngine) -> dict[str, int]:
    """Abort a request whose keys are loaded and one whose keys are stored, and ask for them again.

    Returns the index of every request that has ended.
    """
    index = {engine.add(prompt): i for i, prompt in enumerate(prompts(LENGTHS))}
    seen: set[str] = set()
    while engine.num_unfinished:
        engine.step()
        engine.check_integrity()
        storing = [r for r in child(engine)._req_status.values() if r.transfer_jobs]
        victims = {
            "loading": engine.requests_in(RequestStatus.WAITING_FOR_REMOTE_KVS),
            "storing": [r.req.request_id.rsplit("-", 1)[0] for r in storing if not r.req.is_finished()],
        }
        for kind, request_ids in victims.items():
            if kind not in seen and (victim := next((r for r in request_ids if r in index), None)):
                seen.add(kind)
                engine.abort(victim)
                engine.check_integrity()
                again = index.pop(victim)
                index[engine.add(prompts(LENGTHS)[again])] = again
    assert seen == {"loading", "storing"}
    return index


def run_twice(model_path: ModelPath) -> list[Any]:
    """Stores are made late, from blocks that requests have left; the second round loads what was stored."""
    transfer = multi(hisparse(), offloading(copy_delay=8, offload_prompt_only=False))
    with offloading_engine(model_path, transfer) as engine:
        engine.run(prompts((40, 20, 28, 24)))
        finish(engine)
        completions = engine.run(prompts((40, 20, 28, 24)))
        finish(engine)
    return completions


@pytest.mark.parametrize("is_told", [pytest.param(True, marks=pytest.mark.long), False])
def test_blocks_that_other_groups_get_are_stored_first(
    model_path: ModelPath, reference: Reference, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """With what vLLM's connector knows by itself, outputs differ."""
    expected = reference(SEPARATE, DTYPE)
    if not is_told:
        monkeypatch.setattr(compat._HandedOut, "take", lambda self: set())
    assert (differences(run_twice(model_path), expected) == []) == is_told


def test_failed_loads_are_computed_again(
    model_path: ModelPath, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that failed leaves anything in its blocks; vLLM gives them up and starts the request again."""
    expected = reference(SEPARATE, DTYPE)
    failed = plant_failures(monkeypatch, num_loads=3)
    with offloading_engine(model_path, multi(hisparse(), offloading())) as engine:
        for _ in range(2):
            completions = engine.run(prompts(LENGTHS), engine.check_integrity)
            finish(engine)
            assert differences(completions, expected) == []
        assert len(failed) == 3
        assert external_hits(engine) > 0


def plant_failures(patch: pytest.MonkeyPatch, num_loads: int) -> list[str]:
    """The first loads copy something else, and are reported as failed. Returns the requests, as they fail."""
    failed: list[str] = []
    spoilt: list[int] = []  # jobs; they end in order
    submit, results = HostOffloadingWorker.submit_load, compat.OffloadingConnector.get_transfer_results

    def submit_load(self: HostOffloadingWorker, job_id: int, source: Any, target: Any) -> bool:
        handler = self._load_handler
        copy = handler._swap_blocks_batch
        if len(spoilt) < num_loads:
            spoilt.append(job_id)
            handler._swap_blocks_batch = lambda sources, *rest, **hints: copy(sources * 0 + sources[0], *rest)
        try:
            return submit(self, job_id, source, target)
        finally:
            handler._swap_blocks_batch = copy

    def get_transfer_results(self: Any, finished: set[str]) -> Any:
        found = results(self, finished)
        for request_id in sorted(found.finished_recving)[: num_loads - len(failed)]:
            found.failed_recving.add(request_id)
            failed.append(request_id)
        return found

    patch.setattr(HostOffloadingWorker, "submit_load", submit_load)
    patch.setattr(compat.OffloadingConnector, "get_transfer_results", get_transfer_results)
    return failed
