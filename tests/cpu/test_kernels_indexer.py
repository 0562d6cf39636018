"""The stand-ins against references that loop."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.cpu.kernels.indexer import (
    FP8,
    FP8_MAX,
    build_prefill_chunk_metadata,
    quantize,
    quantize_groups,
)

EPS = 1e-4


def quantize_one(x: list[float], power_of_two: bool) -> tuple[torch.Tensor, float]:
    scale = float(torch.tensor(max(EPS, *map(abs, x))) / FP8_MAX)
    if power_of_two:
        scale = 2.0 ** math.ceil(math.log2(scale))
    return torch.tensor([value / scale for value in x]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize(power_of_two: bool, dtype: torch.dtype) -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0] = 0.0
    x[1, 0] = FP8_MAX * 4  # an exact power of two as the scale
    x[2] *= 1e-8
    values, scales = quantize(x, EPS, power_of_two)
    for row, value, scale in zip(x, values, scales, strict=True):
        expected, expected_scale = quantize_one(row.float().tolist(), power_of_two)
        assert scale.item() == pytest.approx(expected_scale, rel=1e-6)
        if power_of_two:
            assert scale.item() == expected_scale
            assert torch.equal(value.view(torch.uint8), expected.view(torch.uint8))
        assert (value.float() * scale - row.float()).abs().max() <= scale * 16  # half a step near the maximum


def test_a_vector_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(33, 128, generator=torch.Generator().manual_seed(2))
    values, scales = quantize(x, EPS, True)
    for i in range(33):
        value, scale = quantize(x[i : i + 1], EPS, True)
        assert torch.equal(value.view(torch.uint8), values[i : i + 1].view(torch.uint8))
        assert torch.equal(scale, scales[i : i + 1])


def test_quantize_groups_writes_every_group() -> None:
    y = torch.randn(5, 256, generator=torch.Generator().manual_seed(3))
    y_q = torch.full((5, 256), math.nan).to(FP8)
    y_s = torch.full((5, 2), math.nan)
    quantize_groups(
        y, y_q, y_s, 128, 256, 256, EPS, fp8_min=-FP8_MAX, fp8_max=FP8_MAX, use_ue8m0=True, BLOCK=128
    )
    for row in range(5):
        for group in range(2):
            part = slice(group * 128, group * 128 + 128)
            expected, scale = quantize_one(y[row, part].tolist(), True)
            assert torch.equal(y_q[row, part].view(torch.uint8), expected.view(torch.uint8))
            assert y_s[row, group] == scale


@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5),
    cut=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_chunk_metadata(requests: list[tuple[int, int]], cut: tuple[int, int]) -> None:
    """Requests of (new rows, rows before them), seen through a slice of the chunk's query rows."""
    total = sum(new for new, _ in requests)
    start, stop = sorted(min(edge, total) for edge in cut)
    expected, key_owner, first_key = [], [], 0
    for request, (new, before) in enumerate(requests):
        expected += [(first_key, first_key + before + i + 1) for i in range(new)]
        key_owner += [request] * (before + new)
        first_key += before + new
    lens = torch.tensor([before + new for new, before in requests], dtype=torch.int32)
    query_start = torch.tensor([0] + [new for new, _ in requests], dtype=torch.int32).cumsum(0).int()
    cu_lens = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()])
    owner = torch.full((first_key,), -1, dtype=torch.int32)
    ks, ke = (torch.full((stop - start,), -1, dtype=torch.int32) for _ in range(2))
    build_prefill_chunk_metadata(
        query_start, lens, cu_lens, cu_lens, owner, ks, ke, start, stop, 0, 1, 1, 1024, 1
    )
    assert owner.tolist() == key_owner
    assert list(zip(ks.tolist(), ke.tolist(), strict=True)) == expected[start:stop]
