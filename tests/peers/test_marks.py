"""Marks of requests whose pages are lent, some of them in the same row."""

import torch

from vllm_hisparse.peers.marks import Marks, has_mark, row_bytes, row_of


def marked(marks: Marks, request_id: str) -> bool:
    return has_mark(marks.table[row_of(request_id, len(marks.table))], request_id)


def test_set_and_cleared() -> None:
    marks = Marks(50, 64)
    names = [f"r{i}" for i in range(60)]
    marks.update(names, [])
    assert all(marked(marks, name) for name in names)
    marks.update(names[:5], names[30:])  # a request that is preempted starts again
    assert [marked(marks, name) for name in names] == [True] * 30 + [False] * 30
    marks.update([], names)
    assert not marks.table.any()


def test_a_full_row() -> None:
    """Whoever finds no place has no mark, and others keep theirs."""
    marks = Marks(1, 64)
    names = [f"r{i}" for i in range(10)]
    marks.update(names, [])
    assert [marked(marks, name) for name in names] == [True] * 8 + [False] * 2
    marks.update([], ["r9", "r0"])
    marks.update(["r8"], [])
    assert [marked(marks, name) for name in names] == [False] + [True] * 8 + [False]


def test_row_bytes() -> None:
    """What a region of NIXL's can have: whole bytes a token."""
    for page_tokens in (4, 64, 128):
        assert row_bytes(page_tokens) % page_tokens == 0
        assert Marks(3, page_tokens).table.view(torch.uint8).shape == (3, row_bytes(page_tokens))
