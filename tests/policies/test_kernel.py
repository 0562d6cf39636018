"""The replayed policies of the engine against `ops/reference.py`, slot by slot."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.streams import random_trace, traces
from vllm_hisparse.ops import make_batch, reference
from vllm_hisparse.policies.kernel import GAIN
from vllm_hisparse.policies.registry import POLICIES
from vllm_hisparse.policies.replay import replay
from vllm_hisparse.traces import Trace

PAGE = 8


def test_the_gain_table_is_the_kernels() -> None:
    assert GAIN.tolist() == [*reference.GAIN, 0]


def reference_misses(trace: Trace, rows: int, policy: int) -> np.ndarray:
    """Rows that the ops load, [streams, steps], with every page on the host and a region a stream."""

    def int32(*shape: int, fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.int32)

    streams, steps, k = trace.top.shape
    pages, blocks = -(-trace.num_positions // PAGE), -(-rows // PAGE)
    each = torch.arange(streams, dtype=torch.int32)
    tables = {
        "resident": int32(1, streams, pages, fill=-1),
        "host": torch.arange(streams * pages, dtype=torch.int32).view(streams, pages),
        "hot": torch.arange(streams * blocks, dtype=torch.int32).view(1, streams, blocks),
        "batch": make_batch(each, each, torch.full_like(each, rows)),
        "slot_of": torch.full((streams, pages * PAGE), -1, dtype=torch.int16),
        "position_of": int32(streams, rows, fill=-1),
        "key": int32(streams, rows, fill=reference.EMPTY_KEY),
        "clock": int32(streams),
    }
    result = np.empty((streams, steps), np.int64)
    for step in range(steps):
        plan_count = int32(streams)
        reference.resolve(
            torch.from_numpy(trace.top[:, step].copy()),
            torch.arange(streams + 1, dtype=torch.int32),
            rows=int32(1, streams, k),
            counts=int32(streams),
            **tables,
            plan_host_row=int32(streams, k),
            plan_slot=int32(streams, k),
            plan_count=plan_count,
            counters=torch.zeros(8, dtype=torch.int64),
            parts=[0],
            block_size=PAGE,
            block_stride_rows=PAGE,
            max_query_rows=1,
            policy=policy,
        )
        result[:, step] = plan_count.numpy()
    return result


@pytest.mark.parametrize(("name", "policy"), [("lru", reference.LRU), ("lrfu-kernel", reference.LRFU)])
def test_misses_are_those_of_the_ops(name: str, policy: int) -> None:
    @given(trace=traces(), rows=st.integers(6, 20))
    @settings(max_examples=15)
    def check(trace: Trace, rows: int) -> None:
        want = reference_misses(trace, rows, policy)
        assert np.array_equal(replay(trace, POLICIES[name], rows).loaded, want)

    check()


@pytest.mark.parametrize(("name", "policy"), [("lru", reference.LRU), ("lrfu-kernel", reference.LRFU)])
def test_a_long_stream_is_that_of_the_ops(name: str, policy: int) -> None:
    """Long enough for ages beyond the cap."""
    trace = random_trace(3, streams=1, steps=1400, positions=1500)
    result = replay(trace, POLICIES[name], 20)
    assert np.array_equal(result.loaded, reference_misses(trace, 20, policy))
    assert 0 < result.loaded.sum() < trace.num_selected.sum()
