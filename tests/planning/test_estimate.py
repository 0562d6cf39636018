"""Estimates: equal to what an engine plans, and monotone in every input."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.engines import PATTERNS, engine, layer_specs
from vllm_hisparse.config import GIB, MIB
from vllm_hisparse.planning.estimate import Estimate, Setup, estimate
from vllm_hisparse.planning.groups import kv_cache_groups
from vllm_hisparse.planning.layout import layout_from
from vllm_hisparse.planning.machines import GPU_MEMORY_MIB, kv_memory_bytes
from vllm_hisparse.planning.models import BUILT_IN, load_model
from vllm_hisparse.planning.pools import kv_cache_config
from vllm_hisparse.planning.report import steady_state

GLM = load_model("glm-5.2")


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("tokens", [16384, 131072])
@pytest.mark.parametrize("host_gib", [40, 400])
def test_equal_to_the_plan_of_an_engine(name: str, tokens: int, host_gib: int) -> None:
    vllm_config = engine(max_model_len=tokens, max_num_seqs=64, host_pool_gib=float(host_gib))
    groups = kv_cache_groups(vllm_config, layer_specs(PATTERNS[name]))
    assert groups is not None
    layout = layout_from(vllm_config, kv_cache_config(vllm_config, groups, 30 * GIB, host_gib * GIB))
    setup = Setup(load_model(name), 30 * GIB, tokens, host_gib * GIB, max_requests=64)
    result = estimate(setup)
    assert result.num_device_blocks == layout.num_device_blocks
    assert result.num_host_blocks == layout.num_host_blocks
    assert result.num_regions == layout.num_regions
    assert result.steady == steady_state(vllm_config, layout)
    assert result.floor == steady_state(vllm_config, layout, layout.floor_hot_blocks)
    names = {"layers": (), "index_groups": (), "indexer_layers": ()}
    assert replace(result.layout, **names) == replace(layout, **names)


def test_glm_52_on_eight_h200() -> None:
    """Requests of 202,752 tokens, 36 GiB of KV memory, a quarter of a TiB of host memory a rank."""
    result = estimate(Setup(GLM, 36 * GIB, 202752, 256 * GIB))
    assert result.need.steady_blocks(64) == 1056 + 6 * 66
    assert 3 < result.plain.value < 4
    assert 26 < result.steady.value < 27
    assert result.steady.limit == "host"
    unlimited = estimate(replace(result.setup, host_pool_bytes=None))
    assert 44 < unlimited.steady.value < 45
    assert unlimited.steady.limit == "device"
    assert unlimited.host_budget_bytes == 491 * GIB


def test_the_needed_host_pool_is_just_enough() -> None:
    wanted = estimate(Setup(GLM, 20 * GIB, 131072))
    exact = estimate(replace(wanted.setup, host_pool_bytes=wanted.needed_host_pool_bytes))
    less = estimate(replace(wanted.setup, host_pool_bytes=wanted.needed_host_pool_bytes - 8 * MIB))
    assert exact.floor.limit == "device"
    assert less.floor.limit == "host"


def test_pools_too_small_for_a_request() -> None:
    assert not estimate(Setup(GLM, GIB // 2, 131072)).starts
    assert not estimate(Setup(GLM, 20 * GIB, 131072, GIB)).starts
    assert estimate(Setup(GLM, 20 * GIB, 131072, 8 * GIB)).starts
    assert estimate(Setup(GLM, 0, 131072)).steady.value == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "got context=0; need at least 1"),
        ({"context": 2 << 20}, "got a context of 2097152 tokens; need at most 1048576"),
        ({"speculative_tokens": -1}, "got -1 speculative tokens"),
        ({"kv_dtype": "fp4"}, "got KV dtype 'fp4'; need one of"),
        ({"options": {"max_hot_row": 1}}, "got unknown options ['max_hot_row']"),
        ({"start_hot_rows": 1024}, "got device_buffer_size=1024; need 2048 to 32768"),
    ],
)
def test_setups_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="need") as error:
        estimate(Setup(**{"model": GLM, "kv_bytes": GIB, "context": 4096, **changes}))
    assert str(error.value).startswith(message)


SETUPS = st.builds(
    Setup,
    model=st.sampled_from([load_model(name) for name in BUILT_IN]),
    kv_bytes=st.integers(0, 120 * GIB),
    context=st.integers(1, 163840),
    host_pool_bytes=st.integers(1, 1024 * GIB),
    speculative_tokens=st.integers(0, 4),
    kv_dtype=st.sampled_from(["fp8", "bf16"]),
    max_requests=st.sampled_from([1, 16, 256, 1024]),
    step_tokens=st.sampled_from([512, 8192, 16384]),
)


def no_more(less: Estimate, more: Estimate) -> None:
    """Concurrency of `less` is at most that of `more`, every figure of it."""
    for name in ("plain", "admission", "steady", "floor"):
        assert getattr(less, name).value <= getattr(more, name).value, name


@settings(max_examples=60)
@given(SETUPS, st.one_of(st.integers(0, 2 * MIB), st.integers(0, 60 * GIB)))
def test_more_kv_memory_never_lowers_concurrency(setup: Setup, more: int) -> None:
    no_more(estimate(setup), estimate(replace(setup, kv_bytes=setup.kv_bytes + more)))


@settings(max_examples=60)
@given(SETUPS, st.one_of(st.integers(0, 8 * MIB), st.integers(0, 400 * GIB)))
def test_more_host_memory_never_lowers_concurrency(setup: Setup, more: int) -> None:
    assert setup.host_pool_bytes is not None
    no_more(estimate(setup), estimate(replace(setup, host_pool_bytes=setup.host_pool_bytes + more)))


@settings(max_examples=60)
@given(SETUPS, st.one_of(st.integers(0, 130), st.integers(0, 100_000)))
def test_a_longer_context_never_raises_concurrency(setup: Setup, more: int) -> None:
    longer = min(setup.context + more, setup.model.max_context)
    no_more(estimate(replace(setup, context=longer)), estimate(setup))


@settings(max_examples=60)
@given(SETUPS, st.integers(1, 4), st.integers(8 * GIB, 120 * GIB), st.integers(32768, 163840))
def test_more_speculation_never_raises_concurrency(
    setup: Setup, drafts: int, kv_bytes: int, context: int
) -> None:
    """From one speculative token on: the first adds a layer, and its blocks may happen to fit better.

    Of long requests that fit: where hardly one does, fewer but larger regions leave a block more.
    """
    some = replace(
        setup, speculative_tokens=drafts, kv_bytes=kv_bytes, context=context, host_pool_bytes=1024 * GIB
    )
    one_more = estimate(replace(some, speculative_tokens=drafts + 1))
    assert one_more.steady.value <= estimate(some).steady.value
    assert one_more.floor.value <= estimate(some).floor.value


@settings(max_examples=60)
@given(
    SETUPS, st.sampled_from(sorted(GPU_MEMORY_MIB)), st.integers(1, 63), st.integers(1, 8), st.floats(0.5, 1)
)
def test_more_gpus_never_lower_concurrency(
    setup: Setup, gpu: str, tp: int, more: int, utilization: float
) -> None:
    """Each holds a smaller share of the weights; a larger share of its memory has the same effect."""

    def served(ranks: int, share: float) -> Estimate:
        memory = kv_memory_bytes(setup.model, gpu, ranks, setup.speculative_tokens, share)
        return estimate(replace(setup, kv_bytes=max(0, memory)))

    no_more(served(tp, utilization), served(tp + more, utilization))
    no_more(served(tp, utilization), served(tp, (1 + utilization) / 2))


@settings(max_examples=60)
@given(SETUPS, st.integers(1, 16384))
def test_longer_steps_never_raise_concurrency(setup: Setup, more: int) -> None:
    no_more(estimate(replace(setup, step_tokens=setup.step_tokens + more)), estimate(setup))


@settings(max_examples=60)
@given(SETUPS, st.integers(1, 1024))
def test_more_requests_never_lower_what_they_were_limited_to(setup: Setup, more: int) -> None:
    """Their tables take device memory, so only where the number of requests was the limit."""
    fewer, most = estimate(setup), estimate(replace(setup, max_requests=setup.max_requests + more))
    for name in ("plain", "admission", "steady", "floor"):
        if getattr(fewer, name).limit == "max_num_seqs":
            assert getattr(fewer, name).value <= getattr(most, name).value, name


@settings(max_examples=60)
@given(SETUPS, st.integers(4096, 16384), st.integers(0, 8192))
def test_larger_regions_never_raise_concurrency(setup: Setup, rows: int, more: int) -> None:
    small = replace(setup, speculative_tokens=0, start_hot_rows=rows)
    assert estimate(replace(small, start_hot_rows=rows + more)).steady.value <= estimate(small).steady.value


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("context", [8192, 131072])
def test_smaller_rows_and_no_speculation_hold_more(name: str, drafts: int, context: int) -> None:
    """Not for every size of pool: blocks of other shapes waste other shares of it."""
    setup = Setup(load_model(name), 30 * GIB, context, speculative_tokens=drafts)
    no_more(estimate(replace(setup, kv_dtype="bf16")), estimate(setup))
    no_more(estimate(setup), estimate(replace(setup, speculative_tokens=0)))
