"""Plain engines, without HiSparse: the same bits whatever the pool, the chunks and the batch."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_hisparse.testing.engine import Completion, complete, counters, engine, random_prompts
from vllm_hisparse.testing.models import DEEPSEEK, SEPARATE, SHARED, TinyModel, make_model

pytestmark = pytest.mark.engine

PROMPTS = random_prompts(6, 40, 260, seed=1)
NUM_TOKENS = 24
SMALL_POOL = 13  # blocks: less than the requests need together

Run = Callable[..., tuple[list[Completion], dict[str, float]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Completions and counters of an engine, each distinct engine run once."""
    root = tmp_path_factory.mktemp("models")
    done: dict[str, tuple[list[Completion], dict[str, float]]] = {}

    def run_once(model: TinyModel, **options: Any) -> tuple[list[Completion], dict[str, float]]:
        key = f"{model} {sorted(options.items())}"
        if key not in done:
            path: Path = make_model(root, model)
            with engine(path, **options) as llm:
                done[key] = complete(llm, PROMPTS, NUM_TOKENS), counters(llm)
        return done[key]

    return run_once


@pytest.mark.parametrize("model", [SEPARATE, SHARED, DEEPSEEK], ids=lambda model: model.name)
def test_outputs_tell_prompts_apart(run: Run, model: TinyModel) -> None:
    completions, _ = run(model)
    assert len({completion.token_ids for completion in completions}) == len(PROMPTS)
    assert all(len(set(completion.token_ids)) > NUM_TOKENS / 2 for completion in completions)


@pytest.mark.parametrize("model", [SEPARATE, SHARED], ids=lambda model: model.name)
def test_preemption_changes_nothing(run: Run, model: TinyModel) -> None:
    expected, roomy = run(model)
    completions, tight = run(model, num_gpu_blocks_override=SMALL_POOL)
    assert roomy["vllm:num_preemptions"] == 0
    assert tight["vllm:num_preemptions"] > 0
    assert completions == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_and_batches_change_nothing(run: Run, dtype: str) -> None:
    expected, _ = run(SEPARATE, dtype=dtype) if dtype != "float32" else run(SEPARATE)
    other, _ = run(SEPARATE, dtype=dtype, max_num_batched_tokens=72, max_num_seqs=3, async_scheduling=False)
    assert other == expected


def test_a_request_alone_gives_the_same(run: Run) -> None:
    expected, _ = run(SEPARATE)
    alone, _ = run(SEPARATE, max_num_seqs=1, max_num_batched_tokens=512)
    assert alone == expected


def test_a_cached_prefix_gives_the_same(tmp_path: Path) -> None:
    prompts = random_prompts(2, 20, 60, seed=2, shared=150)
    with engine(make_model(tmp_path)) as llm:
        first = complete(llm, prompts, 8)
        before = counters(llm)["vllm:prefix_cache_hits"]
        again = complete(llm, prompts, 8)
        assert counters(llm)["vllm:prefix_cache_hits"] >= before + 2 * 128
    assert again == first


def test_an_engine_is_freed(tmp_path: Path) -> None:
    """What the harness keeps from the garbage collector are modules, not the engines before."""
    path = make_model(tmp_path, SEPARATE)
    models = []
    for _ in range(2):
        with engine(path) as llm:
            executor = llm.llm_engine.engine_core.engine_core.model_executor
            models.append(weakref.ref(executor.driver_worker.worker.model_runner.get_model()))
            del llm, executor
    assert gc.get_freeze_count() > 0
    assert [model() for model in models] == [None, None]
