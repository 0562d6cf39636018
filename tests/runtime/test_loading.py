"""The host pool beside the loading of a model: what comes when, and what is left if either fails."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_hisparse.runtime import host_memory as pool
from vllm_hisparse.runtime import loading
from vllm_hisparse.runtime.host_memory import host_memory, release_host_memory
from vllm_hisparse.testing.harness import hisparse

MIB = 1 << 20


class BackgroundPinning:
    """Stands in for registrations that take until somebody waits for them."""

    def __init__(self, events: list[str], error: BaseException | None) -> None:
        self._events = events
        self._error = error

    def __call__(self, *arguments: Any) -> "BackgroundPinning":
        self._events.append("begun")
        return self

    def wait(self) -> None:
        self._events.append("waited")
        if self._error is not None:
            raise self._error

    def undo(self) -> bool:
        self._events.append("undone")
        return True


class Worker(SimpleNamespace):
    """A plain namespace cannot be watched for its end."""


def worker(host_pool_gib: float = 1 / 1024, *, has_hisparse: bool = True) -> Any:
    transfer = hisparse(host_pool_gib=host_pool_gib)
    return Worker(
        device=torch.device("cuda"),
        vllm_config=SimpleNamespace(
            attention_config=SimpleNamespace(hisparse_config=SimpleNamespace() if has_hisparse else None),
            kv_transfer_config=SimpleNamespace(**transfer) if has_hisparse else None,
            model_config=SimpleNamespace(hf_config=SimpleNamespace(index_topk=4), hf_text_config=None),
        ),
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What happens in which order while a worker loads; the error ends up there too."""
    release_host_memory()  # of engines before
    monkeypatch.setattr(loading, "replica", lambda: None)

    def load(
        worker: Any, pinning: BaseException | None = None, loading_: BaseException | None = None
    ) -> list[str]:
        events: list[str] = []

        def theirs(self: Any, *, load_dummy_weights: bool) -> None:
            events.append(f"loaded, dummies {load_dummy_weights}")
            if loading_ is not None:
                raise loading_

        monkeypatch.setattr(pool, "Pinning", BackgroundPinning(events, pinning))
        monkeypatch.setattr(loading, "_without_hisparse", theirs)
        try:
            loading.load_model(worker, load_dummy_weights=True)
        except BaseException as error:
            events.append(repr(error))
        return events

    return load


def test_pinned_while_the_model_loads(run: Callable[..., list[str]]) -> None:
    loaded = worker()
    assert run(loaded) == ["begun", "loaded, dummies True", "waited"]
    begun = pool._kept
    for _ in range(2):  # vLLM allocates caches twice
        assert host_memory(MIB - 5000, pinned=True) is begun, "less, in whole blocks"
    release_host_memory()


def test_without_hisparse_nothing_is_taken(run: Callable[..., list[str]]) -> None:
    assert run(worker(has_hisparse=False)) == ["loaded, dummies True"]
    assert pool._kept is None


def test_too_little_memory_is_said_before_anything_is_loaded(run: Callable[..., list[str]]) -> None:
    (error,) = run(worker(host_pool_gib=1 << 20))
    assert "got a host pool of 1048576.00 GiB and" in error
    assert pool._kept is None


@pytest.mark.parametrize("reason", [ValueError("no such weights"), SystemExit(143)], ids=["error", "signal"])
def test_a_load_that_ends_gives_it_back(run: Callable[..., list[str]], reason: BaseException) -> None:
    assert run(worker(), loading_=reason) == ["begun", "loaded, dummies True", "undone", repr(reason)]
    assert pool._kept is None


def test_a_pool_that_cannot_be_pinned_ends_the_load(run: Callable[..., list[str]]) -> None:
    reason = RuntimeError("got CUDA error 2")
    events = run(worker(), pinning=reason)
    assert events == ["begun", "loaded, dummies True", "waited", "undone", repr(reason)]
    assert pool._kept is None


def test_a_worker_that_goes_takes_what_nobody_asked_for(run: Callable[..., list[str]]) -> None:
    """And no more: not what its KV caches use, and not what the next engine has begun."""
    first = worker()
    run(first)
    del first
    assert pool._kept is None
    first, second = worker(), worker()
    run(first)
    run(second)
    del first
    assert pool._kept is not None
    host_memory(MIB, pinned=True)
    del second
    assert pool._kept is not None
    release_host_memory()


def test_the_next_engine_takes_its_own(run: Callable[..., list[str]]) -> None:
    """Also in the same process: the same if it is as large, another one otherwise."""
    workers = [worker(), worker(), worker(host_pool_gib=2 / 1024)]
    run(workers[0])
    first = pool._kept
    host_memory(MIB - 5000, pinned=True)
    assert "begun" not in run(workers[1])
    assert host_memory(MIB, pinned=True) is first
    run(workers[2])
    assert pool._kept is not None and pool._kept.num_bytes == 2 * MIB
    release_host_memory()
