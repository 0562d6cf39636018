"""Attention against the formula, and both ways of gathering against each other."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_hisparse.cpu.attention import (
    CpuSparseMLAMetadata,
    attend,
    gather_hisparse,
    gather_paged,
    in_position_order,
)

WIDTH, VALUE_WIDTH, BLOCK = 80, 64, 16


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def metadata(lens: list[int], table: torch.Tensor) -> CpuSparseMLAMetadata:
    request = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).int()
    fields: dict[str, Any] = dict.fromkeys(CpuSparseMLAMetadata.__dataclass_fields__, 0)
    return CpuSparseMLAMetadata(
        **{**fields, "block_table": table, "req_id_per_token": request, "block_size": BLOCK}
    )


def test_attend() -> None:
    q, kv = randn(5, 3, WIDTH, seed=1), randn(5, 8, WIDTH, seed=2)
    valid = torch.arange(8) < torch.tensor([[8], [3], [1], [0], [5]])
    out = attend(q, kv, valid, 0.5, VALUE_WIDTH)
    for row in range(5):
        rows = kv[row, valid[row]]
        if not len(rows):
            assert (out[row] == 0).all()
            continue
        weights = torch.softmax(0.5 * q[row].double() @ rows.double().T, -1)
        assert torch.allclose(out[row].double(), weights @ rows[:, :VALUE_WIDTH].double(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    q, kv = randn(150, 4, WIDTH, seed=1).to(dtype), randn(150, 32, WIDTH, seed=2).to(dtype)
    valid = torch.rand(150, 32, generator=torch.Generator().manual_seed(3)) < 0.8
    out = attend(q, kv, valid, 0.1, VALUE_WIDTH)
    for first, end in [(i, i + 1) for i in range(150)] + [(3, 20), (60, 131)]:
        part = slice(first, end)
        assert torch.equal(attend(q[part], kv[part], valid[part], 0.1, VALUE_WIDTH), out[part])


def test_what_is_not_selected_does_not_count() -> None:
    q, kv = randn(2, 4, WIDTH, seed=1), randn(2, 32, WIDTH, seed=2)
    valid = torch.arange(32).expand(2, 32) < 20
    expected = attend(q, kv, valid, 0.1, VALUE_WIDTH)
    kv[:, 20:] = math.nan
    assert torch.equal(attend(q, kv, valid, 0.1, VALUE_WIDTH), expected)


def test_position_order() -> None:
    topk = torch.tensor([[5, -1, 3, 900], [-1, -1, -1, -1]], dtype=torch.int32)
    assert in_position_order(topk).tolist() == [[3, 5, 900, -1], [-1, -1, -1, -1]]


class FakeGroup:
    """One request is resident, the other has its even pages on the host.

    Decode rows find those in a hot region, prefill rows in a staging area for two query rows at a time.
    """

    def __init__(self, cache: torch.Tensor, md: CpuSparseMLAMetadata, staged_from: int) -> None:
        self.rows = cache.reshape(-1, WIDTH)
        self.md = md
        self.staged_from = staged_from
        spare = 40
        self.physical = torch.cat([torch.full((spare * BLOCK, WIDTH), math.nan), self.rows])
        self.shift = spare * BLOCK
        self.hot: dict[int, int] = {}

    def locate(self, topk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        position = topk.clamp_min(0).long()
        request = self.md.req_id_per_token.long()
        rows = self.md.block_table[request].long().gather(1, position // BLOCK) * BLOCK + position % BLOCK
        host = (request == 1).unsqueeze(1) & (position // BLOCK % 2 == 0) & (topk >= 0)
        return rows, host

    def convert_logical_to_physical_topk(
        self,
        layer: int,
        topk: torch.Tensor,
        md: Any,
        *,
        block_stride_rows: int | None,
        return_valid_counts: bool,
    ) -> torch.Tensor:
        assert layer == 7
        assert not return_valid_counts
        rows, host = self.locate(topk)
        result = torch.where(topk >= 0, rows + self.shift, -1)
        result[self.staged_from :][host[self.staged_from :]] = -1
        for token, k in host[: self.staged_from].nonzero().tolist():
            slot = self.hot.setdefault(int(rows[token, k]), len(self.hot))
            self.physical[slot] = self.rows[rows[token, k]]
            result[token, k] = slot
        return result.int()

    def physical_kv_cache(self, layer: int) -> torch.Tensor:
        return self.physical.view(-1, BLOCK, WIDTH)

    def prefill_chunks(
        self, layer: int, topk: torch.Tensor, md: Any
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        rows, host = self.locate(topk)
        staging = torch.full((2 * topk.shape[1], WIDTH), math.nan)
        for first in range(self.staged_from, topk.shape[0], 2):
            end = min(first + 2, topk.shape[0])
            wanted = host[first:end]
            staged = torch.full(wanted.shape, -1, dtype=torch.int32)
            staged[wanted] = torch.arange(int(wanted.sum()), dtype=torch.int32)
            staging.fill_(math.nan)
            staging[: int(wanted.sum())] = self.rows[rows[first:end][wanted]]
            yield first, end, staged, staging


@pytest.mark.parametrize("staged_from", [4, 5, 12])
def test_rows_through_the_index_group_are_the_rows_of_the_cache(staged_from: int) -> None:
    cache = randn(20, BLOCK, WIDTH, seed=1)
    lens = [4, 8]
    table = torch.randperm(20, generator=torch.Generator().manual_seed(2)).int().view(2, 10)
    md = metadata(lens, table)
    topk = torch.full((12, 32), -1, dtype=torch.int32)
    for token in range(12):
        length = 40 + 9 * token
        chosen = torch.randperm(length, generator=torch.Generator().manual_seed(token))[:32]
        topk[token, : 32 - token % 3] = chosen.sort().values[: 32 - token % 3].int()
    expected, expected_valid = gather_paged(cache, topk, md)
    kv, valid = gather_hisparse(FakeGroup(cache, md, staged_from), 7, topk, md)
    assert torch.equal(valid, expected_valid)
    assert torch.equal(kv[valid], expected[valid])
    q = randn(12, 4, WIDTH, seed=3)
    assert torch.equal(
        attend(q, kv, valid, 0.1, VALUE_WIDTH), attend(q, expected, expected_valid, 0.1, VALUE_WIDTH)
    )


def test_gather_reads_strided_caches() -> None:
    """Layers packed in one block leave gaps between a layer's blocks."""
    packed = randn(10, 3, BLOCK, WIDTH, seed=1)
    topk = torch.tensor([[0, 17, 33, -1]], dtype=torch.int32)
    md = metadata([1], torch.tensor([[4, 9, 2]], dtype=torch.int32))
    kv, valid = gather_paged(packed[:, 1], topk, md)
    assert valid.tolist() == [[True, True, True, False]]
    assert torch.equal(kv[0, :3], torch.stack([packed[4, 1, 0], packed[9, 1, 1], packed[2, 1, 1]]))


def test_update_writes_only_stored_rows() -> None:
    from vllm_hisparse.cpu.attention import CpuSparseMLAImpl

    cache = torch.zeros(10, 2, BLOCK, WIDTH)
    view = cache[:, 1]
    latent, rope = randn(4, VALUE_WIDTH, seed=1), randn(4, 1, WIDTH - VALUE_WIDTH, seed=2)
    slots = torch.tensor([35, -1, 0])  # fewer slots than rows: the last row is padding
    CpuSparseMLAImpl.do_kv_cache_update(SimpleNamespace(), latent, rope, view, slots, "auto", torch.ones(1))
    expected = torch.zeros_like(cache)
    expected[2, 1, 3] = torch.cat([latent[0], rope[0, 0]])
    expected[0, 1, 0] = torch.cat([latent[2], rope[2, 0]])
    assert torch.equal(cache, expected)
