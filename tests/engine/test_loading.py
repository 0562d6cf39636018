"""A real engine takes its host pool beside the model, and the planner's pool is that one."""

import gc
from typing import Any

import pytest

from tests.engine.workload import ENGINE_ARGS, ModelPath
from vllm_hisparse.runtime import host_memory, loading
from vllm_hisparse.runtime.binding import current_runtime
from vllm_hisparse.testing.engine import engine
from vllm_hisparse.testing.harness import hisparse
from vllm_hisparse.testing.models import SEPARATE

pytestmark = pytest.mark.engine


def test_what_was_begun_is_what_is_used(model_path: ModelPath, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = loading._without_hisparse
    begun: list[Any] = []

    def load(*args: Any, **kwargs: Any) -> None:
        begun.append(host_memory._kept)
        theirs(*args, **kwargs)

    monkeypatch.setattr(loading, "_without_hisparse", load)
    with engine(model_path(SEPARATE), kv_transfer_config=hisparse(), **ENGINE_ARGS):
        assert begun == [host_memory._kept]
        pool, whole = current_runtime().memory.host_pool, begun[0].tensor
        assert pool.data_ptr() == whole.data_ptr()
        assert pool.numel() <= whole.numel()
    assert host_memory._kept is None


def test_a_model_that_does_not_load_leaves_none(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        begun.append(host_memory._kept is not None)
        raise ValueError("got no weights; need some because it is a test")

    monkeypatch.setattr(loading, "_without_hisparse", fail)
    with (
        pytest.raises(ValueError, match="got no weights"),
        engine(model_path(SEPARATE), kv_transfer_config=hisparse(), **ENGINE_ARGS),
    ):
        pass
    assert begun == [True]
    assert host_memory._kept is None


def test_caches_that_are_not_allocated_leave_none(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connector is there, and its worker is not."""

    def fail(*args: Any) -> None:
        raise ValueError("got no memory; need some because it is a test")

    monkeypatch.setattr("vllm_hisparse.runtime.memory.Memory.__init__", fail)
    with (
        pytest.raises(ValueError, match="got no memory"),
        engine(model_path(SEPARATE), kv_transfer_config=hisparse(), **ENGINE_ARGS),
    ):
        pass
    assert host_memory._kept is None


def test_an_engine_that_cannot_be_planned_leaves_none(model_path: ModelPath) -> None:
    """The pool was taken by then; vLLM ends no worker that never got its caches."""
    options = ENGINE_ARGS | {"kv_transfer_config": hisparse(host_pool_gib=1 / 4096)}
    with pytest.raises(Exception, match="host_pool_gib"), engine(model_path(SEPARATE), **options):
        pass
    gc.collect()
    assert host_memory._kept is None
