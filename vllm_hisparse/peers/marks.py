"""Whether a producer with HiSparse still lends a request's pages: a mark in its memory says so.

A rank sets the mark when it starts on the prompt and clears it before the pages can be given to others. Who
has read pages reads the mark after them: if it is there then, they were there all the time. That holds
whatever ends a lease: its time, another reader that gives the pages back, a consumer that comes late.
"""

import hashlib
from collections.abc import Iterable

import torch

__all__ = ["Marks", "has_mark", "row_bytes", "row_of"]

MARK_BYTES = 8
MIN_ROW_BYTES = 64  # a row holds the marks of 8 requests, dealt out to rows by their ids


def row_bytes(page_tokens: int) -> int:
    """Bytes of a row: NIXL's regions are of whole bytes a token."""
    return max(MIN_ROW_BYTES, page_tokens)


def row_of(request_id: str, num_rows: int) -> int:
    """Row of a request's mark."""
    return _mark(request_id) % num_rows


def has_mark(row: torch.Tensor, request_id: str) -> bool:
    """Whether `row`, int64 [marks], has the request's mark."""
    return bool((row == _mark(request_id)).any())


class Marks:
    """One rank's, in `table`: int64 [rows, marks of a row], in host memory."""

    def __init__(self, num_rows: int, page_tokens: int) -> None:
        self.table = torch.zeros(num_rows, row_bytes(page_tokens) // MARK_BYTES, dtype=torch.int64)

    def update(self, lent: Iterable[str], over: Iterable[str]) -> None:
        """Requests whose pages are lent from now on, and requests whose pages are not any more."""
        for request_id in lent:
            self._set(request_id)
        for request_id in over:
            self._clear(request_id)

    def _set(self, request_id: str) -> None:
        """In a row without a free place it gets no mark, and its pages are not taken."""
        row = self.table[row_of(request_id, len(self.table))]
        free = (row == 0).nonzero()
        if len(free) and not has_mark(row, request_id):
            row[free[0]] = _mark(request_id)

    def _clear(self, request_id: str) -> None:
        row = self.table[row_of(request_id, len(self.table))]
        row[row == _mark(request_id)] = 0


def _mark(request_id: str) -> int:
    """Not zero: that is no mark."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:MARK_BYTES], "little", signed=True) or 1
