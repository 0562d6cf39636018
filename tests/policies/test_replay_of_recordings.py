"""The figures of docs/policy.md, from the recordings they were measured on: needs a folder with them."""

import os
from pathlib import Path

import pytest

from vllm_hisparse.policies.registry import POLICIES
from vllm_hisparse.policies.replay import replay
from vllm_hisparse.traces import Trace, load_trace

FOLDER = os.environ.get("HISPARSE_TRACES")
pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="HISPARSE_TRACES names no folder with book.npz and agent.npz"),
    pytest.mark.long,
]

TOLERANCE = 0.2  # percentage points
AT_2_3_4_K = {
    "book": {
        "keep-current": (28.7, 28.7, 28.7),
        "fifo": (16.9, 11.3, 8.2),
        "lru": (13.0, 8.1, 5.8),
        "clock": (12.7, 7.9, 5.7),
        "s3-fifo": (12.1, 7.5, 5.4),
        "lfu": (11.9, 7.4, 5.3),
        "lrfu": (11.7, 7.3, 5.3),
        "lrfu-kernel": (11.71, 7.30, 5.29),
        "belady": (7.7, 4.4, 3.1),
    },
    "agent": {
        "keep-current": (32.5, 32.5, 32.5),
        "fifo": (20.3, 14.6, 11.3),
        "lru": (16.3, 11.2, 8.6),
        "clock": (16.0, 10.9, 8.4),
        "s3-fifo": (15.3, 10.4, 8.0),
        "lfu": (15.0, 10.2, 7.8),
        "lrfu": (14.8, 10.1, 7.8),
        "lrfu-kernel": (14.81, 10.11, 7.81),
        "belady": (10.2, 6.4, 4.7),
    },
}
LRU_OF_BOOK = {1.25: 21.9, 1.5: 17.9, 2: 13.0, 3: 8.1, 4: 5.8, 6: 3.7, 8: 2.7}  # by multiples of top-k


@pytest.fixture(scope="module")
def recordings() -> dict[str, Trace]:
    return {name: load_trace(Path(str(FOLDER)) / f"{name}.npz") for name in AT_2_3_4_K}


@pytest.mark.parametrize("policy", list(AT_2_3_4_K["book"]))
def test_figures(recordings: dict[str, Trace], policy: str) -> None:
    for name, trace in recordings.items():
        figures = [replay(trace, POLICIES[policy], n * trace.top_k).miss_percent for n in (2, 3, 4)]
        assert figures == pytest.approx(AT_2_3_4_K[name][policy], abs=TOLERANCE), name


def test_lru_by_size(recordings: dict[str, Trace]) -> None:
    trace = recordings["book"]
    figures = {n: replay(trace, POLICIES["lru"], int(n * trace.top_k)).miss_percent for n in LRU_OF_BOOK}
    assert figures == pytest.approx(LRU_OF_BOOK, abs=TOLERANCE)
