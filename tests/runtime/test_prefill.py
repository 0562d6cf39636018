"""Prefills over contexts that are partly on the host, CUDA's way: query rows over one paged cache each."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hisparse.runtime.counters import STAGED, Counters
from vllm_hisparse.runtime.prefill import PrefillGather
from vllm_hisparse.runtime.staging import Staging

PAGE, ROW_BYTES, BLOCKS, PAGES = 4, 16, 40, 12
BLOCK_ROWS = 2 * PAGE  # another layer's page lies between two of this one's


pytestmark = pytest.mark.usefixtures("cpu_library")


def content(tensor: torch.Tensor, row: int) -> list[int]:
    return tensor.reshape(-1, ROW_BYTES)[row].tolist()


class Engine:
    """A runtime of one layer with `num_staged` staging pages. Every row of a pool says where it lies."""

    def __init__(
        self, residency: list[list[bool]], queries: list[int], contexts: list[int], num_staged: int
    ) -> None:
        num = len(residency)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(BLOCKS, generator=generator).int()
        is_resident = torch.tensor(residency)  # [requests, pages]
        blocks = order[: num * PAGES].view(num, PAGES)
        self.resident, self.host = torch.where(is_resident, blocks, -1), torch.where(is_resident, -1, blocks)
        layout: Any = SimpleNamespace(
            page_tokens=PAGE, page_bytes=PAGE * ROW_BYTES, max_pages=PAGES, row_bytes=ROW_BYTES,
            layer_offset=(0,), host_offset=(0,), host_row_stride=(ROW_BYTES,), layer_part=(0,),
            block_stride_bytes=BLOCK_ROWS * ROW_BYTES,
        )  # fmt: skip

        def random(rows: int) -> torch.Tensor:
            return torch.randint(0, 255, (rows * ROW_BYTES,), dtype=torch.uint8, generator=generator)

        self.device_pool, self.host_pool = random(BLOCKS * BLOCK_ROWS), random(BLOCKS * PAGE)
        self.pages = self.device_pool.as_strided(
            (BLOCKS, PAGE, ROW_BYTES), (BLOCK_ROWS * ROW_BYTES, ROW_BYTES, 1)
        )
        self.counters = Counters(1, torch.device("cpu"))
        runtime: Any = SimpleNamespace(
            layout=layout,
            config=SimpleNamespace(
                prefill_staging_bytes=num_staged * PAGE * ROW_BYTES, top_k=3, prefill_staging_mib=1
            ),
            device=torch.device("cpu"),
            memory=SimpleNamespace(device_pool=self.device_pool, host_pool=self.host_pool),
            tables=SimpleNamespace(
                resident=self.resident[None],
                host=self.host,
                batch=torch.arange(num, dtype=torch.int32)[:, None],
            ),
            counters=self.counters,
            batch=list(range(num)),
            step=SimpleNamespace(queries=queries, contexts=contexts),
            num_host_only=lambda slot: sum(not r for r in residency[slot][: -(-contexts[slot] // PAGE)]),
        )
        runtime.staging = Staging(runtime, runtime.device)
        self.prefill = PrefillGather(runtime)

    def row(self, request: int, position: int) -> list[int]:
        """The row's bytes, by the tables alone."""
        page, offset = divmod(position, PAGE)
        if (block := int(self.resident[request, page])) >= 0:
            return content(self.device_pool, block * BLOCK_ROWS + offset)
        return content(self.host_pool, int(self.host[request, page]) * PAGE + offset)


@settings(max_examples=60)
@given(data=st.data())
def test_pieces_hold_every_selected_row(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 3))
    contexts = data.draw(st.lists(st.integers(1, PAGES * PAGE), min_size=num, max_size=num))
    queries = data.draw(st.lists(st.integers(1, 6), min_size=num, max_size=num))
    flags = st.lists(st.booleans(), min_size=PAGES, max_size=PAGES)
    residency = data.draw(st.lists(flags, min_size=num, max_size=num))
    first_row = data.draw(st.integers(0, num - 1))  # rows before are decodes
    engine = Engine(residency, queries, contexts, data.draw(st.integers(3, PAGES)))
    topk = torch.tensor(
        [
            data.draw(st.lists(st.integers(-1, contexts[r] - 1), min_size=3, max_size=3))
            for r in range(first_row, num)
            for _ in range(queries[r])
        ],
        dtype=torch.int32,
    )
    owner = [r for r in range(first_row, num) for _ in range(queries[r])]
    covered = 0
    for piece in engine.prefill.pieces(0, engine.pages, topk, first_row):
        assert piece.first == covered
        covered = piece.end
        for row in range(piece.first, piece.end):
            for position in topk[row].tolist():
                if position >= 0:
                    page, offset = divmod(position, PAGE)
                    found = piece.pages[int(piece.table[0, page]), offset].tolist()
                    assert found == engine.row(owner[row], position)
    assert covered == topk.shape[0]


def test_only_what_is_on_the_host_is_staged() -> None:
    residency = [[True] * PAGES, [True] * (PAGES - 1) + [False]]
    engine = Engine(residency, [2, 2], [PAGES * PAGE] * 2, PAGES)
    topk = torch.zeros(4, 3, dtype=torch.int32)
    in_place, staged = engine.prefill.pieces(0, engine.pages, topk, 0)
    assert in_place.pages.data_ptr() == engine.pages.data_ptr()
    assert staged.pages.data_ptr() != engine.pages.data_ptr()
    assert engine.counters.totals()[0, STAGED] == 1, "of the staged pages one was read from the host"


def test_a_context_larger_than_the_area_goes_in_as_few_pieces_as_halving_gives() -> None:
    engine = Engine([[False] * PAGES], [4], [PAGES * PAGE], 3)
    apart = torch.tensor([[0, 4, 8], [12, 16, 20], [24, 28, 32], [36, 40, 44]], dtype=torch.int32)
    assert [(p.first, p.end) for p in engine.prefill.pieces(0, engine.pages, apart, 0)] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 4),
    ]
    together = torch.tensor([[0, 1, 2]] * 4, dtype=torch.int32)
    assert [(p.first, p.end) for p in engine.prefill.pieces(0, engine.pages, together, 0)] == [(0, 4)]


def test_a_batch_of_another_step_is_noticed() -> None:
    engine = Engine([[True] * PAGES], [2], [PAGES * PAGE], 3)
    with pytest.raises(AssertionError, match="not of this step's prefills"):
        list(engine.prefill.pieces(0, engine.pages, torch.zeros(3, 3, dtype=torch.int32), 0))
