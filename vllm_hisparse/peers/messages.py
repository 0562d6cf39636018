"""What the scheduler tells the workers about other engines: integers, names and tuples."""

from typing import NamedTuple

import msgspec

__all__ = ["ImportJob", "PageImport", "Peer", "PeerMessage"]


class Peer(NamedTuple):
    """An engine that has computed prompts, and where its handshake is answered."""

    engine_id: str
    host: str
    port: int
    num_ranks: int


class PageImport(NamedTuple):
    """Where one page lands. A host block of -1: on the device, in one block a part. Otherwise on the host."""

    page: int
    device_blocks: tuple[int, ...]
    host_block: int


class ImportJob(msgspec.Struct, frozen=True, array_like=True):
    """A request's pages in another engine, to be read and then given back there.

    Without keys nothing is read, and nobody waits for the job.
    """

    request_id: str
    peer: Peer
    remote_request_id: str
    remote_blocks: tuple[tuple[int, ...], ...] = ()  # [the peer's transfer group][page]; -1: not there
    pages: tuple[PageImport, ...] = ()
    keys: tuple[tuple[int, int], ...] = ()  # (page, block) of the indexer keys; at least those of `pages`
    staging: tuple[tuple[int, ...], ...] = ()  # [page-sized place][part]: device blocks to pass through
    age_s: float = 0.0  # time since the request came to this engine


class PeerMessage(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Scheduler to workers, once a step."""

    jobs: tuple[ImportJob, ...] = ()
    cancelled: tuple[str, ...] = ()  # requests whose jobs are to end as soon as nothing is written any more
    heartbeats: tuple[tuple[Peer, tuple[str, ...]], ...] = ()  # the peers' names of requests that are wanted
