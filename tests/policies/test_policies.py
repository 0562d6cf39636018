"""Every policy: what it gives up, by hand; and what holds of all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.streams import one_stream, random_trace, traces
from vllm_hisparse.policies.oracle import next_uses
from vllm_hisparse.policies.registry import POLICIES
from vllm_hisparse.policies.replay import replay
from vllm_hisparse.traces import Trace

EVERY = list(POLICIES)
K = 6


def loaded(trace: Trace, policy: str, rows: int) -> list[int]:
    return replay(trace, POLICIES[policy], rows).loaded[0].tolist()


def words(text: str) -> Trace:
    """One position a step, a letter each."""
    return one_stream(*([ord(letter)] for letter in text))


@pytest.mark.parametrize(
    ("policy", "rows", "text", "misses"),
    [
        ("keep-current", 3, "aabba", "a.b.a"),
        ("lru", 2, "abacab", "ab.c.b"),  # c takes b's slot
        ("fifo", 2, "abacab", "ab.cab"),  # c takes a's slot though a was just used
        ("clock", 2, "abacab", "ab.c.b"),  # a is marked
        ("clock", 3, "abcabcda", "abc...da"),  # all are marked: the hand goes round and takes the first
        ("lfu", 2, "aabbbcbac", "a.b..c.ac"),  # c and a, used less than b, take each other's slot
        ("lrfu", 2, "aaaaabcb", "a....bcb"),  # old uses of a outweigh the latest of b
        ("lrfu-kernel", 2, "aaaaabcb", "a....bcb"),
        ("s3-fifo", 10, "aabcdefghijkla", "a.bcdefghijkl."),  # a is used in the small queue and stays
        ("belady", 2, "abcabac", "abc.b.c"),
    ],
)
def test_by_hand(policy: str, rows: int, text: str, misses: str) -> None:
    want = [int(letter != ".") for letter in misses]
    assert loaded(words(text), policy, rows) == want


def test_hits_are_newer_than_the_misses_of_their_step() -> None:
    # Step 1 hits 1 and loads 3 in place of 2; step 2 needs a slot: 3 is older.
    assert loaded(one_stream([1, 2], [1, 3], [1, 4], [3, 4]), "lru", 3) == [2, 1, 1, 0]
    assert loaded(one_stream([1, 2], [1, 3], [4], [1]), "lru", 2) == [2, 1, 1, 0]


def test_scores_decide() -> None:
    trace = one_stream([0], [1], [2], [0], [1])
    scores = np.zeros((1, 5, 3))
    scores[0, 2] = (-1, 0, 1)  # when 2 comes, 0 is worth less than 1
    trace = Trace(trace.top, trace.newest, scores=scores, threshold=np.zeros((1, 5)))
    assert loaded(trace, "score", 2) == [1, 1, 1, 1, 0]
    scores[0, 2] = (1, 0, 1)
    assert loaded(trace, "score", 2)[3:] == [0, 1]
    scores[0, 2] = (-0.1, 0, 1)  # age weighs more: 0 and 1 were used 2 and 1 steps ago
    assert loaded(trace, "saf", 2)[3] == 1
    scores[0, 2] = (0.5, 0, 1)
    assert loaded(trace, "saf", 2)[3] == 0


@pytest.mark.parametrize("policy", EVERY)
def test_policies_without_scores_say_so(policy: str) -> None:
    trace = random_trace(0, scores=False)
    if POLICIES[policy].needs_scores:
        with pytest.raises(ValueError, match=f"got a trace without scores; need them for {policy} because"):
            replay(trace, POLICIES[policy], 2 * K)
    else:
        replay(trace, POLICIES[policy], 2 * K)


@pytest.mark.parametrize("policy", sorted(set(EVERY) - {"keep-current"}))
def test_a_region_has_to_hold_a_selection(policy: str) -> None:
    with pytest.raises(ValueError, match="got a region of 5 rows; need 6 because a step selects that many"):
        replay(random_trace(0, k=6), POLICIES[policy], 5)


@pytest.mark.parametrize("policy", sorted(set(EVERY) - {"keep-current"}))
def test_in_a_region_of_the_context_only_first_uses_miss(policy: str) -> None:
    trace = random_trace(1, positions=90)
    distinct = max(len(np.unique(stream[stream >= 0])) for stream in trace.top)
    result = replay(trace, POLICIES[policy], distinct)
    for stream, top in enumerate(trace.top):
        seen: set[int] = set()
        for step, selection in enumerate(top):
            chosen = set(selection[selection >= 0].tolist())
            assert result.loaded[stream, step] == len(chosen - seen)
            seen |= chosen


@given(trace=traces(), rows=st.integers(K, 3 * K))
@settings(max_examples=40)
def test_nothing_misses_less_than_belady(trace: Trace, rows: int) -> None:
    bound = replay(trace, POLICIES["belady"], rows).loaded.sum(1)
    for name, policy in POLICIES.items():
        if name != "keep-current":
            assert (replay(trace, policy, rows).loaded.sum(1) >= bound).all(), name


@given(trace=traces(k=1), rows=st.integers(1, 12))
@settings(max_examples=40)
def test_lru_misses_less_the_larger_the_region(trace: Trace, rows: int) -> None:
    """The stack property, where a step selects one row.

    Larger steps keep it almost: whether a row counts as hit or as loaded depends on the size.
    """
    small, large = (replay(trace, POLICIES["lru"], size).loaded for size in (rows, rows + 1))
    assert (large <= small).all()


@given(trace=traces(), rows=st.integers(K, 3 * K))
@settings(max_examples=20)
def test_streams_do_not_meet(trace: Trace, rows: int) -> None:
    for name in sorted(set(EVERY) - {"random"}):
        together = replay(trace, POLICIES[name], rows).loaded
        for stream in range(trace.num_streams):
            part = slice(stream, stream + 1)
            alone = Trace(trace.top[part], trace.newest[part])
            if trace.scores is not None and trace.threshold is not None:
                alone = Trace(
                    alone.top, alone.newest, scores=trace.scores[part], threshold=trace.threshold[part]
                )
            if POLICIES[name].region_rows(alone, rows) == POLICIES[name].region_rows(trace, rows):
                assert np.array_equal(replay(alone, POLICIES[name], rows).loaded[0], together[stream]), name


def test_the_newest_row_is_free() -> None:
    result = replay(one_stream([5, 1], [6, 5], [7, 1], newest=[5, 6, 7]), POLICIES["lru"], 2)
    assert result.loaded.tolist() == [[2, 1, 2]]
    assert result.misses.tolist() == [[1, 0, 1]]
    assert result.miss_percent == 25  # 1 of the 4 rows selected after the first step


def test_next_uses() -> None:
    assert next_uses(one_stream([1, 2], [2], [1, 3])).tolist() == [[[2, 1], [3, 3], [3, 3]]]
