"""One piece of host memory for the ranks of a node.

It has no name: rank 0 of the node creates an anonymous file and the others open it through /proc, so nothing
is left behind however the processes end, and the size of /dev/shm (64 MiB in a container by default) is no
limit to it.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from vllm.distributed import get_tp_group

__all__ = ["NAME", "SharedMap", "map_private", "map_shared", "node_of_this_process", "replica"]

NAME = "vllm-hisparse-host-pool"  # in /proc/PID/maps


@dataclass(frozen=True)
class SharedMap:
    """Memory, zero at first, and this process's place among those that have mapped it."""

    map: mmap.mmap
    rank: int  # 0 has created it
    num_ranks: int


def replica() -> dist.ProcessGroup | None:
    """The ranks that hold the same rows; None for a single one."""
    group = get_tp_group()
    return group.cpu_group if group.world_size > 1 else None


def map_private(num_bytes: int) -> SharedMap:
    """Memory of this process alone.

    The kernel gives it huge pages, which a shared file does not get by default, and they are pinned several
    times as fast. A forked process does not inherit it: it would be given copies of the pinned pages.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return SharedMap(memory, 0, 1)


def node_of_this_process() -> str:
    """Equal for processes that can open each other's files through /proc: one kernel, one PID namespace."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel} {os.readlink('/proc/self/ns/pid')}"


def map_shared(
    group: dist.ProcessGroup,
    num_bytes: Callable[[int], int],
    check: Callable[[], None],
    node: str | None = None,
) -> SharedMap:
    """Memory shared with the ranks of `group` that are on this rank's node. A collective call.

    `num_bytes`: size by number of ranks that share it. `check`: raises ValueError if the node does not have
    the memory; called on the rank that creates it. `node`: this rank's, for tests.
    Raises ValueError on every rank of the group if any of them fails.
    """
    nodes = _gather(group, node_of_this_process() if node is None else node)
    me = dist.get_rank(group)
    members = [rank for rank, other in enumerate(nodes) if other == nodes[me]]
    size = num_bytes(len(members))
    fd = -1
    try:
        offer, error = None, None
        if me == members[0]:
            try:
                check()
                fd = os.memfd_create(NAME)
                os.ftruncate(fd, size)
                offer = os.getpid(), fd, size
            except ValueError as reason:
                error = str(reason)
            except OSError as reason:
                error = f"got {reason} for a host pool of {size} bytes; need memory that processes can share"
        offers = _exchange(group, offer, error)
        pid, their_fd, their_size = offers[members[0]]
        assert their_size == size, "ranks of a node planned host pools of different sizes"
        if me != members[0]:
            try:
                fd = os.open(f"/proc/{pid}/fd/{their_fd}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as reason:
                error = (
                    f"got no access to the host pool of rank {members[0]}: {reason}; need all ranks of a "
                    "node to run as one user because they share one pool"
                )
        _exchange(group, None, error)  # the file is open everywhere
        return SharedMap(mmap.mmap(fd, size), members.index(me), len(members))
    finally:
        if fd >= 0:
            os.close(fd)


def _exchange(group: dist.ProcessGroup, item: Any, error: str | None) -> list[Any]:
    """Everybody's items, or the first error as a ValueError on every rank."""
    results = _gather(group, (item, error))
    for _, reason in results:
        if reason is not None:
            raise ValueError(reason)
    return [item for item, _ in results]


def _gather(group: dist.ProcessGroup, item: Any) -> list[Any]:
    items: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items
