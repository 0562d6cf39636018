"""The harness that makes engines on CUDA comparable, as far as it runs without CUDA."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hisparse.testing.determinism import Replay, top_k


@given(data=st.data())
def test_top_k_takes_the_first_of_equals(data: st.DataObject) -> None:
    width, k = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 8))
    ends = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=4))
    score = st.sampled_from([-1.0, 0.0, 0.5, 2.0])
    logits = [data.draw(st.lists(score, min_size=width, max_size=width)) for _ in ends]
    found = torch.full((len(ends), k), 99, dtype=torch.int32)
    top_k(torch.tensor(logits), torch.tensor(ends, dtype=torch.int32), found)
    for row, end, result in zip(logits, ends, found.tolist(), strict=True):
        best = sorted(sorted(range(end), key=lambda i: (-row[i], i))[:k])
        assert result == best + [-1] * (k - len(best))


def test_a_replayed_step_shares_all_but_the_churn_with_the_one_before() -> None:
    replay = Replay(num_leaders=2, num_steps=5, num_rows=3, top_k=40, context=1000, churn=0.1, device="cpu")
    topk = torch.empty(2, 40, dtype=torch.int32)
    steps = []
    for _ in range(4):
        for _ in range(2):
            replay.write(topk)
            steps.append([set(row.tolist()) for row in topk])
    for leader in range(2):
        of_leader = steps[leader::2]
        assert all(len(row) == 40 for rows in of_leader for row in rows)
        for before, after in pairwise(of_leader):
            assert [len(a & b) for a, b in zip(before, after, strict=True)] == [36, 36]
    assert steps[0] != steps[1], "leaders select alike"
