"""Prompts computed by one engine and decoded by another, over real NIXL between two processes.

Outputs have to be those of one engine that does both. The consumer runs in this process, so that its pools
and page states can be looked at after every step.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pd import PLAIN, RemoteProducer, producer, with_nixl
from tests.engine.workload import ENGINE_ARGS, ModelPath, Reference, differences, prompts
from vllm_hisparse.scheduler.landing import Landing
from vllm_hisparse.testing.harness import HiSparseEngine, Prompt, hisparse, hisparse_engine
from vllm_hisparse.testing.models import SEPARATE, SHARED, TinyModel

pytest.importorskip("nixl")
pytestmark = pytest.mark.engine

SHORT = (16, 10, 14, 12)  # tokens of a request
ROOMY, TIGHT = 200, 40  # device blocks
SETTINGS: dict[str, Any] = {"low_watermark": 0.1, "high_watermark": 0.2}
LIMIT_S = 60


class Pair:
    """A producer and, while a test lasts, an engine that reads from it."""

    def __init__(self, remote: RemoteProducer, model: Path, expected: Any) -> None:
        self.remote = remote
        self.model = model
        self.expected = expected

    def consumer(self, blocks: int, policy: str = "fail", **options: Any) -> Any:
        transfer = with_nixl(hisparse(**SETTINGS), "kv_consumer", policy, **options)
        return hisparse_engine(
            self.model,
            dtype="bfloat16",
            num_gpu_blocks_override=blocks,
            kv_transfer_config=transfer,
            **ENGINE_ARGS,
        )

    def wait_until_nothing_is_lent(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.remote.num_held and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.remote.num_held == 0
        assert self.remote.num_leaked == 0


@pytest.fixture(scope="module")
def pair(
    model_path: ModelPath, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """vLLM's own NixlConnector without HiSparse on the producing side."""
    expected = reference(SEPARATE, "bfloat16")
    log = tmp_path_factory.mktemp("plain") / "log"
    with producer(model_path(SEPARATE), log, PLAIN, **ENGINE_ARGS) as remote:
        yield Pair(remote, model_path(SEPARATE), expected)


def borrow(engine: HiSparseEngine, pair: Pair, requests: list[Prompt]) -> list[str]:
    """Have the prompts computed and queue requests for them; their ids."""
    params = pair.remote.prefill(requests)
    return [engine.add(p, kv_transfer_params=x) for p, x in zip(requests, params, strict=True)]


def check(engine: HiSparseEngine, pair: Pair, ids: list[str], requests: list[Prompt]) -> None:
    """The requests' outputs are whole, and bit for bit those of one engine."""
    found = [engine.completions[i] for i in ids]
    assert [len(c.token_ids) for c in found] == [p.num_tokens for p in requests]
    assert differences(found, pair.expected) == []


def step_until(engine: HiSparseEngine, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        engine.step()
        engine.check_integrity()


@pytest.mark.parametrize("landing", Landing, ids=lambda landing: landing.value)
def test_same_bits(pair: Pair, landing: Landing) -> None:
    """Under pressure prompts land on the host, a page at a time: regions have 64 rows."""
    requests = prompts(SHORT)
    with pair.consumer(ROOMY if landing is Landing.DEVICE else TIGHT) as engine:
        ids = borrow(engine, pair, requests)
        engine.drain(engine.check_integrity)
        engine.finish()
        check(engine, pair, ids, requests)
        counters = engine.coordinator.imports.counters
        assert counters.arrived == len(requests)
        assert counters.host == 0 if landing is Landing.DEVICE else counters.host > 3
    pair.wait_until_nothing_is_lent()


def test_abort_while_pages_arrive(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a transfer that takes its time; the others are not disturbed."""
    requests = prompts(SHORT)
    with pair.consumer(TIGHT) as engine:
        reader = engine.reader
        monkeypatch.setattr(reader._agent, "state", lambda handle: "PROC")
        ids = borrow(engine, pair, requests)
        step_until(engine, lambda: reader.counters.reads >= 2)
        for request_id in ids[::2]:
            engine.abort(request_id)
        for _ in range(3):
            engine.step()
            engine.check_integrity()
        monkeypatch.undo()
        engine.drain(engine.check_integrity)
        engine.finish()
        kept = [i for i in range(len(ids)) if ids[i] in engine.completions]
        assert kept == list(range(1, len(ids), 2))
        found = [engine.completions[ids[i]] for i in kept]
        assert differences(found, [pair.expected[i] for i in kept]) == []
    pair.wait_until_nothing_is_lent()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_no_progress(pair: Pair, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that does not end in time: computed here, or reported to the client; nothing is left."""
    requests = prompts(SHORT, count=3)
    with pair.consumer(TIGHT, policy, import_timeout_s=0.2) as engine:
        ids = borrow(engine, pair, requests)
        monkeypatch.setattr(engine.reader._agent, "state", lambda handle: "PROC")
        step_until(engine, lambda: engine.coordinator.imports.counters.failed == len(ids))
        engine.drain(engine.check_integrity)
        engine.finish()
        if policy == "recompute":
            check(engine, pair, ids, requests)
        else:
            assert [engine.completions[i].token_ids for i in ids] == [()] * len(ids)
    pair.wait_until_nothing_is_lent()


def test_the_producer_is_killed(
    model_path: ModelPath, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With reads under way: their prompts are computed here, to the same bits."""
    model, requests = model_path(SEPARATE), prompts(SHORT, count=4)
    with producer(model, tmp_path / "log", PLAIN, **ENGINE_ARGS) as remote:
        pair = Pair(remote, model, reference(SEPARATE, "bfloat16"))
        with pair.consumer(TIGHT, "recompute", import_timeout_s=3.0) as engine:
            ids = borrow(engine, pair, requests)
            step_until(engine, lambda: engine.reader.counters.reads >= 1)
            remote.process.kill()
            remote.process.wait()
            engine.drain(engine.check_integrity)
            engine.finish()
            check(engine, pair, ids, requests)
            assert engine.coordinator.imports.counters.failed > 0


@pytest.mark.parametrize(
    ("landing", "model", "blocks"),
    [(Landing.DEVICE, SEPARATE, 30), (Landing.DEVICE, SHARED, 44), (Landing.HOST, SHARED, 44)],
    ids=["device-separate", "device-shared", "host-shared"],
)
def test_a_producer_with_hisparse(
    landing: Landing,
    model: TinyModel,
    blocks: int,
    model_path: ModelPath,
    reference: Reference,
    tmp_path: Path,
) -> None:
    """Under pressure itself: part of what it lends is in its host pool. Its blocks hold two prompts, or one
    would wait for the other's lease to end.
    """
    path, requests = model_path(model), prompts(SHORT)
    expected = reference(model, "bfloat16")
    options = {**ENGINE_ARGS, "num_gpu_blocks_override": blocks}
    lease = {"kv_lease_duration": 10 * LIMIT_S}
    with producer(path, tmp_path / "log", with_nixl(hisparse(), "kv_producer", **lease), **options) as remote:
        pair = Pair(remote, path, expected)
        room = ROOMY if landing is Landing.DEVICE else TIGHT
        with pair.consumer(room, **lease) as engine:
            ids = []
            for i in range(0, len(requests), 2):  # pages that are lent leave no room for more prompts
                ids += borrow(engine, pair, requests[i : i + 2])
                engine.drain(engine.check_integrity)
                pair.wait_until_nothing_is_lent()
            engine.finish()
            check(engine, pair, ids, requests)
            assert remote.ask({"pages": True})["spilled"] > 0
            assert engine.coordinator.imports.counters.arrived == len(requests)


def test_a_prompt_that_is_read_too_late(model_path: ModelPath, reference: Reference, tmp_path: Path) -> None:
    """The lease ends: a producer with HiSparse gives everything back, and others use it. Whoever comes with
    the parameters then computes the prompt.
    """
    path, requests = model_path(SHARED), prompts(SHORT, count=2)
    options, lease = {**ENGINE_ARGS, "num_gpu_blocks_override": 30}, {"kv_lease_duration": 6}
    with producer(path, tmp_path / "log", with_nixl(hisparse(), "kv_producer", **lease), **options) as remote:
        pair = Pair(remote, path, reference(SHARED, "bfloat16"))
        params = remote.prefill(requests)
        assert remote.num_held > 0
        pair.wait_until_nothing_is_lent()
        with pair.consumer(ROOMY, "recompute", **lease) as engine:
            ids = [engine.add(p, kv_transfer_params=x) for p, x in zip(requests, params, strict=True)]
            engine.drain(engine.check_integrity)
            engine.finish()
            check(engine, pair, ids, requests)
            assert engine.coordinator.imports.counters.failed == len(ids)
