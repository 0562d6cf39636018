"""A row's product is the same alone and among others."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from vllm_hisparse.cpu.rows import BatchedWeight, in_row_blocks, make_rows_independent

PARTS = [(i, i + 1) for i in range(40)] + [(0, 7), (3, 90), (17, 34), (5, 150)]
DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(128, 144), (64, 192), (128, 4), (256, 128), (128, 512)])
def test_row_blocks(dtype: torch.dtype, k: int, n: int) -> None:
    x, weight = randn(150, k, seed=1).to(dtype), randn(n, k, seed=2).to(dtype)
    full = in_row_blocks(lambda rows: linear(rows, weight), x, 0)
    assert torch.allclose(full.double(), (x.double() @ weight.double().T), rtol=1e-2, atol=0.3)
    for first, end in PARTS:
        assert torch.equal(in_row_blocks(lambda rows: linear(rows, weight), x[first:end], 0), full[first:end])
    assert in_row_blocks(lambda rows: linear(rows, weight), x[:0], 0).shape == (0, n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batched_weight(dtype: torch.dtype) -> None:
    x, weight = randn(4, 150, 32, seed=1).to(dtype), randn(4, 32, 64, seed=2).to(dtype)
    blocked = weight.as_subclass(BatchedWeight)
    full = torch.bmm(x, blocked)
    assert type(full) is torch.Tensor
    assert torch.allclose(full.double(), torch.bmm(x.double(), weight.double()), rtol=1e-2, atol=0.3)
    for first, end in PARTS:
        out = torch.full((end - first, 4, 64), torch.nan, dtype=dtype)
        torch.bmm(x[:, first:end], blocked, out=out.transpose(0, 1))
        assert torch.equal(out.transpose(0, 1), full[:, first:end])


def test_model_is_changed_in_place() -> None:
    layer = torch.nn.Module()
    calls: list[int] = []

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(x.shape[0])
        return linear(x, weight, bias)

    layer.cpu_linear = product
    layer.W_UV = torch.nn.Parameter(randn(4, 64, 32, seed=1), requires_grad=False)
    model = torch.nn.ModuleList([layer])
    make_rows_independent(model)
    weight, bias = randn(8, 32, seed=2), randn(8, seed=3)
    x = randn(2, 10, 32, seed=4)
    assert torch.allclose(layer.cpu_linear(x, weight, bias), linear(x, weight, bias), atol=1e-5)
    assert calls == [16, 16]
    assert isinstance(layer.W_UV, BatchedWeight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_need_no_blocks(dtype: torch.dtype) -> None:
    """vLLM's grouped product for experts, which `make_rows_independent` leaves alone."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

    experts, hidden, width, chosen = 32, 128, 64, 2
    w13 = cpu_prepack_moe_weight(randn(experts, 2 * width, hidden, seed=1).to(dtype) / 8, "vec")
    w2 = cpu_prepack_moe_weight(randn(experts, hidden, width, seed=2).to(dtype) / 8, "vec")
    x = randn(150, hidden, seed=3).to(dtype)
    weights = torch.rand(150, chosen, generator=torch.Generator().manual_seed(4))
    scores = torch.rand(150, experts, generator=torch.Generator().manual_seed(5))

    def run(rows: slice, ids: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(x[rows], torch.nan)
        parts = SimpleNamespace(x=x[rows], weights=weights[rows].contiguous(), ids=ids[rows].contiguous())
        cpu_fused_moe(out, parts.x, w13, w2, None, None, parts.weights, parts.ids, "silu", "vec", False)
        return out

    for ids in (scores.topk(chosen).indices.int(), torch.tensor([[3, 9]]).int().repeat(150, 1)):
        full = run(slice(0, 150), ids)
        assert full.isfinite().all()
        for first, end in PARTS:
            assert torch.equal(run(slice(first, end), ids), full[first:end])
