"""This rank's NIXL agent, and its links to the ranks of producing engines."""

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_hisparse.config import user_error
from vllm_hisparse.planning.layout import Layout
from vllm_hisparse.runtime.memory import Memory

from .addresses import AddressBook, Ranges
from .deadlines import Heartbeats, renewed_s
from .marks import row_bytes
from .messages import ImportJob, Peer
from .wire import RemoteRank, shake_hands

__all__ = ["Agent", "Link", "Links", "ReadError", "remote_ranks"]

logger = init_logger("vllm.vllm_hisparse")
BACKENDS = ["UCX"]
NUM_MARK_ROWS = 64  # producers' marks that can be looked at at a time


class ReadError(RuntimeError):
    """NIXL could not read from a producer."""


def remote_ranks(rank: int, num_ranks: int, num_remote: int) -> tuple[list[int], int]:
    """(ranks of a producer that this rank tells when it is done, the first being the one it reads; how many
    ranks of ours tell each of them). Every rank of a producer has all pages.

    Raises ReadError unless one number divides the other.
    """
    if num_ranks % num_remote == 0:
        readers = num_ranks // num_remote
        return [rank // readers], readers
    if num_remote % num_ranks == 0:
        share = num_remote // num_ranks
        return list(range(rank * share, (rank + 1) * share)), 1
    raise ReadError(
        f"got a producer with {num_remote} tensor-parallel ranks for {num_ranks} here; need one number to "
        "divide the other because every rank reads from one"
    )


class Agent:
    """A NIXL agent over both pools, and rows for producers' marks. Reads only; not thread-safe."""

    def __init__(self, memory: Memory) -> None:
        """Registers its memory. Raises ValueError without the package nixl."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise user_error(
                got=f"HiSparseNixlConnector and no nixl ({error})",
                need="the package nixl",
                because="it moves pages between engines",
            ) from error
        self.nixl = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=BACKENDS))
        on_device = memory.device_pool.device
        self.memory = "DRAM" if on_device.type == "cpu" else "VRAM"
        self.device_base = memory.device_pool.data_ptr()
        self.host_base = memory.host_pool.data_ptr()
        row = row_bytes(memory.layout.page_tokens)
        self.marks = torch.zeros(NUM_MARK_ROWS, row, dtype=torch.uint8).view(torch.int64)  # [rows, marks]
        self.free_marks = list(range(NUM_MARK_ROWS))  # rows that nobody reads into
        self._device_ids = {"DRAM": 0, "VRAM": max(on_device.index or 0, 0)}
        self._registered = [
            self._register(memory.device_pool, self.memory),
            self._register(memory.host_pool, "DRAM"),
            self._register(self.marks, "DRAM"),
        ]

    def _register(self, pool: torch.Tensor, memory: str) -> Any:
        whole = [(pool.data_ptr(), pool.nbytes, self._device_ids[memory], "")]
        return self.nixl.register_memory(self.nixl.get_reg_descs(whole, memory), backends=BACKENDS)

    def read(self, link: "Link", ranges: Ranges) -> list[Any]:
        """Start reading `ranges`. Returns the transfers, to be asked for with `state` and then released.

        Raises ReadError; then nothing is being written.
        """
        handles: list[Any] = []
        try:
            for local, remote, to, source in ranges.split():
                here = self.nixl.get_xfer_descs(_with_device(to, self._device_ids[local]), local)
                there = self.nixl.get_xfer_descs(_with_device(source, link.device_ids[remote]), remote)
                handles.append(self.nixl.initialize_xfer("READ", here, there, link.name))
        except Exception as error:
            for handle in handles:
                self.release(handle)
            raise ReadError(f"NIXL cannot read from {link.peer.host}: {error}") from error
        try:
            for handle in handles:
                self.nixl.transfer(handle)
        except Exception:  # the state of that one, and of those after it, is ERR
            logger.debug("HiSparse: a read has not started", exc_info=True)
        return handles

    def state(self, handle: Any) -> str:
        """DONE, PROC or ERR."""
        try:
            return str(self.nixl.check_xfer_state(handle))
        except Exception:
            logger.debug("HiSparse: a read has failed", exc_info=True)
            return "ERR"

    def release(self, handle: Any) -> bool:
        """Whether the transfer is over, cancelled if it was not: only then may its memory be used again."""
        try:
            self.nixl.release_xfer_handle(handle)
        except Exception:
            logger.debug("HiSparse: a read cannot be cancelled yet", exc_info=True)
            return False
        return True

    def close(self) -> None:
        """Deregister the memory."""
        for descriptors in self._registered:
            self.nixl.deregister_memory(descriptors, backends=BACKENDS)
        self._registered.clear()


def _with_device(ranges: np.ndarray, device_id: int) -> np.ndarray:
    """NIXL's descriptors, uint64 [n, 3]: address, bytes, device."""
    return np.ascontiguousarray(np.column_stack((ranges, np.full(len(ranges), device_id, np.uint64))))


@dataclass
class Link:
    """A producer that can be read from."""

    peer: Peer
    name: str  # NIXL's, of the rank that is read
    names: list[str]  # of all ranks that wait for this one
    num_readers: int  # ranks of this engine that each of them waits for
    book: AddressBook
    device_ids: dict[str, int]  # of the rank that is read, by memory
    is_broken: bool = False  # reads fail; whoever asks for it next shakes hands again


class Links:
    """Handshakes in the background, links by engine. Only this thread touches the agent."""

    def __init__(
        self, agent: Agent, layout: Layout, rank: int, num_ranks: int, compatibility: str, lease_s: int
    ) -> None:
        """`lease_s`: seconds for which producers keep the pages of a request that they do not hear of."""
        self._agent = agent
        self._layout = layout
        self._rank = rank
        self._num_ranks = num_ranks
        self._compatibility = compatibility
        self._renewed_s = renewed_s(lease_s)
        self._heartbeats = Heartbeats(self._renewed_s)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hisparse-handshake")
        self._pending: dict[str, Future[list[RemoteRank]]] = {}
        self._links: dict[str, Link] = {}

    def get(self, peer: Peer) -> Link | None:
        """The link to `peer`, or None while hands are being shaken.

        Raises ReadError, Unreadable, zmq.ZMQError or RuntimeError if there is none to be had; asked again, it
        is tried again.
        """
        link = self._links.get(peer.engine_id)
        if link is not None and not link.is_broken:
            return link
        if link is not None:
            self._remove(link)
        pending = self._pending.get(peer.engine_id)
        if pending is None:
            ranks, _ = remote_ranks(self._rank, self._num_ranks, peer.num_ranks)
            self._pending[peer.engine_id] = self._executor.submit(self._shake_all, peer, ranks)
            return None
        if not pending.done():
            return None
        del self._pending[peer.engine_id]
        link = self._links[peer.engine_id] = self._connect(peer, pending.result())
        return link

    def _shake_all(self, peer: Peer, ranks: list[int]) -> list[RemoteRank]:
        return [shake_hands(peer, rank, self._compatibility) for rank in ranks]

    def _connect(self, peer: Peer, remotes: list[RemoteRank]) -> Link:
        first = remotes[0]
        agent = self._agent
        book = AddressBook(self._layout, agent.device_base, agent.host_base, agent.memory, first)
        names = [agent.nixl.add_remote_agent(remote.agent) for remote in remotes]
        _, num_readers = remote_ranks(self._rank, self._num_ranks, peer.num_ranks)
        return Link(peer, names[0], names, num_readers, book, {"DRAM": 0, "VRAM": first.device_id})

    def _remove(self, link: Link) -> None:
        del self._links[link.peer.engine_id]
        try:
            for name in link.names:
                self._agent.nixl.remove_remote_agent(name)
        except Exception:
            logger.debug("HiSparse: a producer is gone already", exc_info=True)

    def heartbeat(self, peer: Peer, requests: Sequence[str]) -> None:
        """Tell a producer that these requests are still wanted, once there is a link."""
        try:
            link = self.get(peer)
        except Exception:
            logger.debug("HiSparse: no link to %s", peer.host, exc_info=True)
            return
        now = time.monotonic()
        if link is not None and self._tell(link, "HB:" + ",".join(requests)):
            self._heartbeats.sent(peer.engine_id, requests, now)

    def kept_until(self, link: Link, job: ImportJob, since: float) -> float:
        """Until when (`time.monotonic()`) a producer without HiSparse is sure to keep the pages of a job.

        `since`: when its request came to this engine. Nobody says when the lease began; a third of it is for
        the request's way here.
        """
        end = since + self._renewed_s
        return self._heartbeats.kept_until(link.peer.engine_id, job.remote_request_id, end)

    def give_back(self, link: Link, request: str) -> None:
        """Tell a producer that the request's pages are not read any more."""
        self._tell(link, f"{request}:{link.num_readers}")

    def _tell(self, link: Link, message: str) -> bool:
        try:
            for name in link.names:
                self._agent.nixl.send_notif(name, message.encode())
        except Exception as error:
            logger.warning("HiSparse: producer at %s cannot be told anything: %s", link.peer.host, error)
            return False
        return True

    def close(self) -> None:
        """End the handshakes."""
        self._executor.shutdown(wait=True, cancel_futures=True)
