"""`reset_prefix_cache`, with requests running and copies between enqueued and completed."""

import pytest

from tests.engine.workload import ENGINE_ARGS, ModelPath, Reference, differences, prompts
from vllm_hisparse.scheduler.residency import PageState
from vllm_hisparse.testing.harness import HiSparseEngine, LateCopies, hisparse, hisparse_engine
from vllm_hisparse.testing.models import SEPARATE

pytestmark = pytest.mark.engine

DTYPE = "bfloat16"
ENGINE = {"dtype": DTYPE, "num_gpu_blocks_override": 26, **ENGINE_ARGS}


def step_until_copies_run(engine: HiSparseEngine) -> None:
    """Until pages of running requests are enqueued and not completed."""
    while not engine.requests_with(PageState.ENQUEUED):
        engine.step()
        assert engine.num_unfinished, "no copy was ever between enqueued and completed"


def test_reset_during_copies(model_path: ModelPath, reference: Reference) -> None:
    """Copies planned before the reset publish nothing after it; requests start again and end exactly."""
    expected = reference(SEPARATE, DTYPE)
    requests = prompts((24, 16), count=6)
    with hisparse_engine(
        model_path(SEPARATE), kv_transfer_config=hisparse(), async_scheduling=False, **ENGINE
    ) as engine:
        engine.use_copies(LateCopies(4))
        request_ids = [engine.add(prompt) for prompt in requests]
        for _ in range(3):
            step_until_copies_run(engine)
            assert engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
            engine.check_integrity()
            assert len(engine.coordinator.ledger) > 0
            assert engine.coordinator.host_pool.num_published == 0
            for _ in range(5):
                engine.step()
        engine.drain(engine.check_integrity)
        engine.finish()
        assert engine.num_preemptions > 0
    assert differences([engine.completions[r] for r in request_ids], expected) == []


def test_nothing_is_found_after_a_reset(model_path: ModelPath) -> None:
    with hisparse_engine(model_path(SEPARATE), kv_transfer_config=hisparse(), **ENGINE) as engine:
        engine.run(prompts(4, count=8))
        engine.finish()
        assert engine.coordinator.host_pool.num_published > 0
        assert engine.llm.llm_engine.reset_prefix_cache()
        assert engine.coordinator.host_pool.num_published == 0
        before = engine.pages["host_hits"] + engine.pages["device_hits"]
        engine.run(prompts(4, count=1))
        assert engine.pages["host_hits"] + engine.pages["device_hits"] == before


def test_reset_with_asynchronous_scheduling(model_path: ModelPath, reference: Reference) -> None:
    """vLLM frees blocks a step late then, so that it refuses to reset running requests; it can go on."""
    expected = reference(SEPARATE, DTYPE)
    requests = prompts((24, 16), count=6)
    with hisparse_engine(
        model_path(SEPARATE), kv_transfer_config=hisparse(), async_scheduling=True, **ENGINE
    ) as engine:
        engine.use_copies(LateCopies(4))
        request_ids = [engine.add(prompt) for prompt in requests]
        step_until_copies_run(engine)
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        engine.check_integrity()
        engine.drain(engine.check_integrity)
        engine.finish()
    assert differences([engine.completions[r] for r in request_ids], expected) == []
