"""The recorder: whom it records, what it keeps, and when it stops."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_hisparse.runtime.recorder import Recorder
from vllm_hisparse.traces import load_trace

PAGE, PAGES, K, GROUPS = 4, 8, 2, 2
MIB_STEPS = 2**20 // (GROUPS * K * 5)
Make = Callable[..., Recorder]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "selections.npz"


@pytest.fixture
def make(file: Path) -> Make:
    """Recorder of an engine whose odd pages are on the host; block of page p of slot s: 100 s + p."""

    def build(verify_rows: int = 1, path: str = str(file), capacity: int | None = None) -> Recorder:
        pages = torch.arange(PAGES, dtype=torch.int32)
        blocks = 100 * torch.arange(4, dtype=torch.int32)[:, None] + pages
        tables = SimpleNamespace(
            resident=torch.where(pages % 2 == 0, blocks, -1)[None],
            host=torch.where(pages % 2 == 1, blocks, -1),
        )
        slot_mapping = torch.tensor([100 * PAGE + 13 + i for i in range(8)])  # pages 3 and 4 of slot 1
        runtime: Any = SimpleNamespace(
            layout=SimpleNamespace(
                index_groups=[("a",), ("b",)], group_parts=[(0,), (0,)], page_tokens=PAGE, max_pages=PAGES
            ),
            config=SimpleNamespace(
                trace_path=path, trace_max_mib=1, verify_rows=verify_rows, floor_hot_rows=verify_rows * K
            ),
            tables=tables,
            groups=[SimpleNamespace(handles=[SimpleNamespace(part=0, slot_mapping=slot_mapping)])],
        )
        recorder = Recorder(runtime)
        if capacity is not None:
            recorder._top = recorder._top[:capacity]
        return recorder

    return build


def step(recorder: Recorder, batch: list[int], *rows: list[int], starts: list[int] | None = None) -> None:
    """A forward whose groups select the same `rows`; one a batch row unless `starts` says otherwise."""
    recorder.begin_step(batch)
    bounds = torch.tensor(range(len(rows) + 1) if starts is None else starts, dtype=torch.int32)
    for group in range(GROUPS):
        recorder.record(group, torch.tensor(rows, dtype=torch.int32), bounds)
    recorder.begin_step([])


def test_one_request_at_a_time(make: Make, file: Path) -> None:
    recorder = make()
    step(recorder, [3, 1], [0, 4], [9, 9])
    step(recorder, [1, 3], [9, 9], [5, -1])  # it moved in the batch
    step(recorder, [1], [9, 9])  # it was left out of a step
    recorder.end_request(3)
    step(recorder, [1], [8, 2**31 - 1])
    recorder.write()
    trace = load_trace(file)
    assert trace.top[0].tolist() == trace.top[1].tolist() == [[0, 4], [5, -1]]
    assert trace.top[2].tolist() == [[8, -1], [-1, -1]]
    assert trace.host is not None
    assert trace.host[0].tolist() == [[False, True], [True, False]]
    assert np.array(trace.group).tolist() == [0, 1, 0, 1]
    assert np.array(trace.request).tolist() == [0, 0, 1, 1]


def test_no_request_twice_unless_its_slot_has_a_new_owner(make: Make, file: Path) -> None:
    recorder = make()
    step(recorder, [2], [1, 2])
    recorder.end_request(2)
    step(recorder, [2], [3, 4])  # the next owner
    recorder.write()
    assert load_trace(file).top[::2, 0].tolist() == [[1, 2], [3, 4]]


def test_the_newest_row_is_found_by_its_page(make: Make, file: Path) -> None:
    recorder = make(verify_rows=2)
    # Tokens 3 and 4 of the batch; the last goes to row 100 * PAGE + 17: page 4, offset 1.
    step(recorder, [0, 1], *([0, 1] for _ in range(5)), starts=[0, 3, 5])
    recorder.write()
    assert not file.exists(), "a prefill of three rows is no decode step"
    recorder = make(verify_rows=2)
    recorder._done.add(0)
    step(recorder, [0, 1], [0, 1], [0, 1], [0, 1], [4, 5], [4, 6], starts=[0, 3, 5])
    recorder.write()
    trace = load_trace(file)
    assert trace.newest.tolist() == [[17], [17]]
    assert trace.top[0].tolist() == [[4, 5, -1, 6]]  # repeated positions are padding


def test_forwards_of_nobody_are_not_recorded(make: Make, file: Path) -> None:
    recorder = make()
    step(recorder, [], [0, 1])
    recorder.write()
    assert not file.exists()


def test_a_full_memory_is_written_once(make: Make, file: Path) -> None:
    recorder = make(capacity=3)
    for i in range(3):
        step(recorder, [0], [i, 30])
    assert not file.exists()
    step(recorder, [0], [7, 8])
    assert load_trace(file).top[0].tolist() == [[0, 30], [1, 30], [2, 30]]
    file.unlink()
    step(recorder, [0], [7, 8])
    recorder.write()
    assert not file.exists()


def test_short_requests_do_not_blow_a_trace_up(make: Make, file: Path) -> None:
    recorder = make(capacity=12)
    for slot, steps in ((0, 1), (1, 5), (2, 2), (3, 1)):
        for _ in range(steps):
            step(recorder, [slot], [slot, 30])
        recorder.end_request(slot)
    recorder.write()
    trace = load_trace(file)  # 12 // 5 = 2 requests: the longest
    assert trace.top[::2, 0, 0].tolist() == [1, 2]
    assert trace.num_steps == 5


def test_a_file_that_cannot_be_written_is_no_failure(make: Make, file: Path) -> None:
    recorder = make()
    step(recorder, [0], [1, 2])
    file.mkdir()
    recorder.write()
    assert file.is_dir()


def test_errors(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need a file in a folder that exists because"):
        make(path=str(tmp_path / "nowhere" / "t.npz"))
    with pytest.raises(ValueError, match="got trace_max_mib=1; need at least 2 because a step selects up to"):
        make(verify_rows=30_000)


def test_capacity(make: Make) -> None:
    assert len(make()._top) == MIB_STEPS
