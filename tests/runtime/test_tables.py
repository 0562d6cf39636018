"""Page tables after deltas."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse import ops
from vllm_hisparse.messages import PageWrite
from vllm_hisparse.runtime.tables import PageTables
from vllm_hisparse.runtime.transfer import to_device

pytestmark = pytest.mark.usefixtures("cpu_library")

SIZES: Any = SimpleNamespace(num_parts=2, max_requests=3, max_pages=4, num_regions=1, max_hot_blocks=1)


def test_every_part_gets_its_block_and_the_last_write_of_a_page_wins() -> None:
    tables = PageTables(SIZES, torch.device("cpu"))
    tables.write_pages(
        (
            PageWrite(2, 3, (7, 8), -1),
            PageWrite(0, 1, (5, 6), -1),
            PageWrite(2, 3, (-1, -1), 9),
        )
    )
    resident, host = torch.full((2, 3, 4), -1), torch.full((3, 4), -1)
    resident[0, 0, 1], resident[1, 0, 1] = 5, 6
    host[2, 3] = 9
    assert torch.equal(tables.resident.long(), resident)
    assert torch.equal(tables.host.long(), host)


@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 3), st.integers(0, 64)), max_size=3), max_size=6
    )
)
def test_batch_rows_are_the_latest_whatever_was_there(batches: list[list[tuple[int, int, int]]]) -> None:
    tables = PageTables(SIZES, torch.device("cpu"))
    assert tables.batch.data_ptr() % 16 == 0
    for rows in [[], *batches]:
        tables.set_batch(rows)
        padded = [*rows, *[(-1, -1, 0)] * (3 - len(rows))]
        assert [tuple(row) for row in tables.batch[:, :3].tolist()] == padded
    assert (tables.resident == -1).all()
    assert (tables.host == -1).all()


def test_what_a_batch_has_not_changed_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, sent = PageTables(SIZES, torch.device("cpu")), []
    monkeypatch.setattr(ops, "write_words", lambda _words, at, value: sent.append((at, value)))
    tables.set_batch([(1, -1, 0), (0, 2, 64)])
    tables.set_batch([(1, -1, 0), (0, 2, 64)])
    tables.set_batch([(1, -1, 0), (0, 2, 128)])
    assert sent == [
        ([0, 1, 2, 4, 5, 6], [1, -1, 0, 0, 2, 64]),
        ([4, 5, 6], [0, 2, 128]),
    ]


def test_a_region_has_its_blocks_in_slot_order() -> None:
    sizes = SimpleNamespace(**{**vars(SIZES), "num_regions": 2, "max_hot_blocks": 3})
    tables = PageTables(sizes, torch.device("cpu"))  # type: ignore[arg-type]
    tables.write_region(1, ((5, 6), (7, 8)))
    assert tables.hot.tolist() == [[[-1] * 3, [5, 6, -1]], [[-1] * 3, [7, 8, -1]]]


def test_what_could_not_be_pinned_is_refused_on_every_device() -> None:
    """A CPU would take it, and CUDA fail in the first step."""
    with pytest.raises(TypeError, match="got ndarray; need a list or a tuple"):
        to_device(np.arange(3), torch.int32, torch.device("cpu"))  # type: ignore[arg-type]
