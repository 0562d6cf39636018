"""Imports on naive ranks: transfers that write at any time until they have ended.

An open transfer scribbles over everything that its job names, in every step. So a block that somebody else
uses before the transfer has ended, or a page that is read before it has arrived, is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from vllm_hisparse.peers.messages import ImportJob, PeerMessage

from .ranks import Content, Rank

__all__ = ["Borrowing", "transfer_params"]

INCOMING = Content("incoming")
Digests = Callable[[str], list[int]]


def transfer_params(
    num_tokens: int, page_tokens: int, host_pages: Sequence[int] = (), theirs: str = "there"
) -> dict[str, Any]:
    """`kv_transfer_params` of a prompt that a producer has computed as its request `theirs`, `host_pages` in
    its host pool.
    """
    pages = range(-(-num_tokens // page_tokens))
    on_host = set(host_pages)
    blocks: list[list[int]] = [[7 + p for p in pages]]
    if on_host:
        blocks.append([9 + p if p in on_host else -1 for p in pages])
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": blocks,
        "remote_engine_id": "producer",
        "remote_request_id": theirs,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": num_tokens,
        **({"hisparse_host_group": 1} if on_host else {}),
    }


class Borrowing:
    """The reading sides of all ranks together."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.jobs: dict[str, ImportJob] = {}  # open transfers, by request
        self.cancelled: set[str] = set()
        self.released: list[str] = []  # requests whose producer was only told that they are not wanted
        self.heartbeats: list[Any] = []  # (peer, its requests), of all steps
        self._ended: set[str] = set()
        self._failed: set[str] = set()

    def accept(self, payload: bytes) -> None:
        """A step's message."""
        message = msgspec.msgpack.decode(payload, type=PeerMessage) if payload else PeerMessage()
        for job in message.jobs:
            if job.keys:
                self.jobs[job.request_id] = job
            else:
                self.released.append(job.request_id)
        self.cancelled |= set(message.cancelled)
        self.heartbeats += message.heartbeats

    def write(self, rank: Rank) -> None:
        """Open transfers write, on a rank that has been through HiSparse's message: they start once all has
        ended that the device was given before (`CopyQueue.fence`), the copies it waits for among it.
        """
        for job in self.jobs.values():
            _scribble(rank, job)

    def deliver_all(self, ranks: Sequence[Rank], digests: Digests) -> None:
        """Every open transfer ends; those of requests that are gone as they are."""
        for request_id in list(self.jobs):
            self.deliver(request_id, ranks, digests)

    def deliver(self, request_id: str, ranks: Sequence[Rank], digests: Digests, failed: bool = False) -> None:
        """A transfer ends on every rank."""
        job = self.jobs.pop(request_id)
        if not failed and request_id not in self.cancelled:
            rows = digests(request_id)
            for rank in ranks:
                self._write(rank, job, rows)
        self.cancelled.discard(request_id)
        self._ended.add(request_id)
        if failed:
            self._failed.add(request_id)

    def take_ended(self) -> tuple[set[str], set[str]]:
        """(requests whose transfers have ended since the last call, of these the failed ones)."""
        ended, self._ended = self._ended, set()
        failed, self._failed = self._failed, set()
        return ended, failed

    def _write(self, rank: Rank, job: ImportJob, rows: list[int]) -> None:
        def content_of(page: int, kind: str) -> Content:
            return Content(kind, tuple(rows[page * self.page_tokens : (page + 1) * self.page_tokens]))

        for key_page, key_block in job.keys:
            rank.device[key_block] = content_of(key_page, "indexer")
        for page in job.pages:
            content = tuple(content_of(page.page, f"part {part}") for part in range(rank.num_parts))
            if page.device_blocks:
                rank.device.update(zip(page.device_blocks, content, strict=True))
            else:
                rank.host[page.host_block] = content


def _scribble(rank: Rank, job: ImportJob) -> None:
    for page in job.pages:
        rank.device.update(dict.fromkeys(page.device_blocks, INCOMING))
        if not page.device_blocks:
            rank.host[page.host_block] = (INCOMING,) * rank.num_parts
    rank.device.update(dict.fromkeys((block for _, block in job.keys), INCOMING))
    rank.device.update(dict.fromkeys((block for place in job.staging for block in place), INCOMING))
