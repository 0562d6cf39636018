"""Keys, logits and selections against references that loop over rows and positions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.cpu.indexer import insert_keys, read_keys, score, select
from vllm_hisparse.cpu.kernels.indexer import FP8, quantize

DIM, BLOCK = 128, 64


def random_fp8(*shape: int, seed: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 100).clamp(-448, 448).to(FP8)


def expected_selection(logits: list[float], num_keys: int, topk: int) -> list[int]:
    best = sorted(range(num_keys), key=lambda position: (-logits[position], position))[:topk]
    return best + [-1] * (topk - len(best))


@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.sampled_from([-1.5, 0.0, 0.5, 2.0]), min_size=12, max_size=12), st.integers(0, 12)
        ),
        min_size=1,
        max_size=4,
    ),
    topk=st.sampled_from([1, 5, 12, 16]),
)
def test_select_prefers_early_positions(rows: list[tuple[list[float], int]], topk: int) -> None:
    logits = torch.tensor([row for row, _ in rows])
    num_keys = torch.tensor([n for _, n in rows], dtype=torch.int32)
    found = select(logits, num_keys, topk)
    assert found.dtype == torch.int32
    assert found.tolist() == [expected_selection(row, n, topk) for row, n in rows]


def test_select_ignores_later_positions() -> None:
    logits = torch.randn(1, 90, generator=torch.Generator().manual_seed(1))
    alone = select(logits[:, :40], torch.tensor([40]), 32)
    assert torch.equal(select(logits, torch.tensor([40]), 32), alone)


def test_score() -> None:
    q, weights = random_fp8(7, 4, DIM, seed=1), torch.randn(7, 4, generator=torch.Generator().manual_seed(2))
    keys, scales = random_fp8(50, DIM, seed=3).double(), torch.rand(50, dtype=torch.float64)
    logits = score(q, weights, keys, scales)
    for row in range(7):
        for key in range(50):
            dots = [
                sum(a * b for a, b in zip(q[row, h].tolist(), keys[key].tolist(), strict=True))
                for h in range(4)
            ]
            expected = 0.0
            for dot, weight in zip(dots, weights[row].tolist(), strict=True):
                expected += max(dot * scales[key].item(), 0.0) * weight
            assert logits[row, key].item() == torch.tensor(expected, dtype=torch.float64).float().item()


def test_score_of_a_row_does_not_depend_on_the_batch() -> None:
    q, weights = (
        random_fp8(70, 4, DIM, seed=1),
        torch.randn(70, 4, generator=torch.Generator().manual_seed(2)),
    )
    keys, scales = random_fp8(130, DIM, seed=3).double(), torch.rand(130, dtype=torch.float64)
    logits = score(q, weights, keys, scales)
    for row in range(70):
        for num_keys in (1, 17, 130):
            alone = score(q[row : row + 1], weights[row : row + 1], keys[:num_keys], scales[:num_keys])
            assert torch.equal(alone[0], logits[row, :num_keys])


def test_keys_come_back_from_their_blocks() -> None:
    cache = torch.full((6, BLOCK, DIM + 4), 0xAA, dtype=torch.uint8)
    k = torch.randn(100, DIM, generator=torch.Generator().manual_seed(4))
    blocks = torch.tensor([5, 2, 0], dtype=torch.int32)
    positions = torch.arange(100)
    slots = blocks[positions // BLOCK] * BLOCK + positions % BLOCK
    slots[37] = -1
    insert_keys(cache, k, slots, power_of_two_scale=True)
    values, scales = read_keys(cache, blocks, 100)
    expected, expected_scales = quantize(k, 1e-4, True)
    kept = positions != 37
    assert torch.equal(values[kept], expected[kept].double())
    assert torch.equal(scales[kept], expected_scales[kept].double())
    assert (cache[blocks[0], 37] == 0xAA).all()
    assert (cache[[1, 3, 4]] == 0xAA).all()
