"""The stand-ins of the sampler's kernels against the interpreted ones, and rows against their neighbours."""

from typing import Any

import pytest
import torch

from tests.cpu.launches import bits, same
from vllm_hisparse.cpu import kernels
from vllm_hisparse.cpu.kernels import sampling

TOPK = 5


def random_logits(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows + vocabulary)) * 8
    return logits.to(dtype)


def log_softmax_arguments(logits: torch.Tensor) -> dict[str, Any]:
    rows, vocabulary = logits.shape
    ids = logits.float().topk(TOPK).indices
    ids[:, 0] = vocabulary - 1
    return {
        "output_ptr": torch.full((rows, TOPK), -7.0),
        "logits_ptr": logits,
        "logits_stride": logits.stride(0),
        "topk_ids_ptr": ids,
        "topk_ids_stride": TOPK,
        "topk": TOPK,
        "vocab_size": vocabulary,
        "BLOCK_SIZE": 1024,
        "TOPK_BLOCK_SIZE": 4,
    }


SHAPES = [(1, 512), (4, 512), (3, 1024), (2, 1500), (5, 3000)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_log_softmax(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = random_logits(*shape, dtype)
    logits[0, :40] = -torch.inf  # tokens that may not be sampled
    left = same(sampling.topk_log_softmax, shape[:1], **log_softmax_arguments(logits))
    expected = logits.double().log_softmax(1).gather(1, left["topk_ids_ptr"])
    assert torch.allclose(left["output_ptr"].double(), expected, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [512, 1500, 9001])
def test_a_row_does_not_depend_on_its_neighbours(vocabulary: int) -> None:
    logits = random_logits(17, vocabulary)
    together = log_softmax_arguments(logits)
    sampling.topk_log_softmax(**together)
    for first, last in [(0, 1), (3, 4), (16, 17), (5, 9), (2, 17)]:
        alone = log_softmax_arguments(logits[first:last].clone())
        sampling.topk_log_softmax(**alone)
        assert torch.equal(bits(alone["output_ptr"]), bits(together["output_ptr"][first:last]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The interpreter compares bfloat16 by its bits as integers: the kernel gets the numbers as fp32."""
    logits = random_logits(*shape, dtype)
    logits[:, 3] = logits[:, 100]  # a tie
    logits[0, 7] = torch.nan
    arguments: dict[str, Any] = {
        "output_ptr": torch.full(shape[:1], -7),
        "logits_ptr": logits.float(),
        "logits_stride": logits.stride(0),
        "token_ids_ptr": torch.arange(shape[0]) + 100,
        "vocab_size": shape[1],
        "BLOCK_SIZE": 1024,
    }
    expected = same(sampling.ranks, shape[:1], **arguments)["output_ptr"]
    sampling.ranks(**arguments | {"logits_ptr": logits})
    assert torch.equal(arguments["output_ptr"], expected)


def gumbel_arguments(logits: torch.Tensor, temperature: float, **changes: Any) -> dict[str, Any]:
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // 1024)
    use_fp64 = changes.get("USE_FP64", False)
    arguments: dict[str, Any] = {
        "local_argmax_ptr": torch.full((rows, blocks), -7),
        "local_argmax_stride": blocks,
        "local_max_ptr": torch.full((rows, blocks), -7.0, dtype=torch.float64 if use_fp64 else torch.float32),
        "local_max_stride": blocks,
        "logits_cache_ptr": None,
        "logits_cache_stride_0": 0,
        "logits_cache_stride_1": 0,
        "logits_cache_col_ptr": None,
        "logits_cache_source_ptr": None,
        "logits_cache_source_stride": 0,
        "logits_ptr": logits,
        "logits_stride": logits.stride(0),
        "expanded_idx_mapping_ptr": torch.arange(rows).flip(0).int(),
        "seeds_ptr": torch.arange(rows) + 11,
        "pos_ptr": torch.arange(rows) + 100,
        "temp_ptr": torch.tensor([0.0] * (rows - 1) + [temperature]),
        "vocab_size": vocabulary,
        "BLOCK_SIZE": 1024,
        "IS_DRAFTING": False,
        "APPLY_TEMPERATURE": False,
        "USE_FP64": False,
        "PER_TOKEN_COL": False,
    }
    return arguments | changes


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_sampling(shape: tuple[int, int], dtype: torch.dtype, use_fp64: bool) -> None:
    logits = random_logits(*shape, dtype)
    logits[:, [20, 300, 500]] = 99.0  # the first wins
    logits[0] = -torch.inf
    same(
        sampling.gumbel_sample,
        (shape[0], -(-shape[1] // 1024)),
        **gumbel_arguments(logits, 0.0, USE_FP64=use_fp64),
    )


def test_rows_without_a_request_are_greedy() -> None:
    arguments = gumbel_arguments(random_logits(3, 512), 0.7)
    arguments["expanded_idx_mapping_ptr"] = torch.tensor(
        [-1, 0, 1], dtype=torch.int32
    )  # not the one that draws
    same(sampling.gumbel_sample, (3, 1), **arguments)


def cached() -> dict[str, Any]:
    """Drafting keeps the logits."""
    return {
        "logits_cache_ptr": torch.full((3, 2, 512), -7.0),
        "logits_cache_stride_0": 1024,
        "logits_cache_stride_1": 512,
        "logits_cache_col_ptr": torch.tensor(1),
        "logits_cache_source_ptr": random_logits(3, 512),
        "logits_cache_source_stride": 512,
        "IS_DRAFTING": True,
    }


@pytest.mark.parametrize(
    ("temperature", "changes"),
    [(0.7, {}), (0.7, {"APPLY_TEMPERATURE": True, "USE_FP64": True}), (0.0, cached())],
)
def test_the_kernel_draws(temperature: float, changes: dict[str, Any]) -> None:
    """A launch that draws, or keeps logits, leaves the kernel's bits: the stand-in touches nothing."""
    from vllm.v1.worker.gpu.sample import gumbel

    kernels.register()
    interpreted, ours = (gumbel_arguments(random_logits(3, 512), temperature, **changes) for _ in range(2))
    assert sampling.gumbel_sample(**ours) == (3, 1)
    assert (ours["local_argmax_ptr"] == -7).all() and (ours["local_max_ptr"] == -7).all()
    kernels.originals[sampling.gumbel_sample][3, 1](**interpreted)
    gumbel._gumbel_sample_kernel[3, 1](**ours)
    for name in ("local_argmax_ptr", "local_max_ptr"):
        assert torch.equal(bits(interpreted[name]), bits(ours[name]))
        assert (ours[name] != -7).all()
    if changes.get("logits_cache_ptr") is not None:
        assert (ours["logits_cache_ptr"][:, 1] != -7).all()
