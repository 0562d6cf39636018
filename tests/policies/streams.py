"""Small traces for tests."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from vllm_hisparse.traces import Trace

NEVER = -2  # a newest row that is not selected


def one_stream(*steps: Sequence[int], newest: Sequence[int] | None = None) -> Trace:
    """A trace of one stream with these selections, padded to the widest."""
    k = max(len(step) for step in steps)
    top = np.array([[*step, *[-1] * (k - len(step))] for step in steps], dtype=np.int32)
    rows = [NEVER] * len(steps) if newest is None else newest
    return Trace(top=top[None], newest=np.array([rows], dtype=np.int32))


def random_trace(
    seed: int, *, streams: int = 3, steps: int = 60, k: int = 6, positions: int = 40, scores: bool = True
) -> Trace:
    """Selections that change slowly, of a context that grows by a row a step; some are short."""
    rng = np.random.default_rng(seed)
    newest = positions - steps + np.tile(np.arange(steps), (streams, 1))
    score = rng.normal(size=(streams, 1, positions)) + rng.normal(size=(streams, steps, positions)) / 2
    score[:, 1:] += 0.7 * (score[:, :-1] - score[:, 1:])
    score[np.arange(positions) > newest[..., None]] = -30
    top = np.argsort(-score, axis=-1)[..., :k]
    threshold = np.take_along_axis(score, top[..., -1:], -1)[..., 0]
    top[rng.random(top.shape) < 0.05] = -1
    return Trace(
        top=top.astype(np.int32),
        newest=newest.astype(np.int32),
        scores=score if scores else None,
        threshold=threshold if scores else None,
    )


def traces(**limits: int) -> st.SearchStrategy[Trace]:
    """Random traces; a failing one is named by its seed."""
    return st.integers(0, 10_000).map(lambda seed: random_trace(seed, steps=30, positions=45, **limits))
