"""One host pool for the ranks of a node: who shares, what if one cannot, and what is left behind."""

import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.leftovers import shared_memory
from vllm_hisparse.runtime.host_sharing import NAME, map_shared

NODES = ["a", "b", "a"]  # of three ranks
SIZE = 1 << 16
LIMIT_S = 60


def nothing() -> None:
    pass


def sizes(num_ranks: int) -> int:
    return SIZE * num_ranks


def files() -> list[str]:
    """Open files of pools."""
    return [path.name for path in Path("/proc/self/fd").iterdir() if NAME in os.path.realpath(path)]


def shared(rank: int, group: Any) -> Any:
    """What each rank sees of what the others of its node have written."""
    mapped = map_shared(group, sizes, nothing, NODES[rank])
    mapped.map[mapped.rank] = 100 + rank
    dist.barrier(group)
    return mapped.rank, mapped.num_ranks, len(mapped.map), bytes(mapped.map[:2])


def without_memory(rank: int, group: Any) -> Any:
    """One rank that creates a pool finds no room for it."""

    def check() -> None:
        if rank == 1:
            raise ValueError("got too little; need more because it is a test")

    with pytest.raises(ValueError, match="got too little; need more") as error:
        map_shared(group, sizes, check, NODES[rank])
    return str(error.value), files()


def without_access(rank: int, group: Any) -> Any:
    """Two ranks that take themselves for neighbours, but one cannot open the other's file."""
    if rank == 2:
        os.open = lambda *args: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    with pytest.raises(ValueError, match=r"host pool of rank 0: .*Permission denied.* because") as error:
        map_shared(group, sizes, nothing, NODES[rank])
    return str(error.value), files()


def killed(rank: int, group: Any) -> Any:
    """The rank that made the pool dies; the others' memory stays."""
    mapped = map_shared(group, sizes, nothing, "a")
    if rank == 0:
        mapped.map[0] = 7
    dist.barrier(group)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return mapped.map[0], Path("/proc/self/maps").read_text().count(NAME)


def _rank(rank: int, world_size: int, store: str, pipe: Connection, work: Callable[[int, Any], Any]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    pipe.send(work(rank, dist.group.WORLD))
    pipe.recv()  # until every rank is done


def run(tmp_path: Path, work: Callable[[int, Any], Any]) -> list[Any]:
    """`work` on each rank's process; None for one that dies."""
    context = get_context("forkserver")  # not "fork": earlier tests leave threads in this process
    context.set_forkserver_preload([__name__])
    store = str(tmp_path / "store")
    ranks = []
    for rank in range(len(NODES)):
        mine, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, len(NODES), store, theirs, work))
        process.start()
        theirs.close()
        ranks.append((process, mine))
    results = []
    for _, pipe in ranks:
        assert pipe.poll(LIMIT_S), "a rank hangs"
        try:
            results.append(pipe.recv())
        except EOFError:
            results.append(None)
    for (process, pipe), result in zip(ranks, results, strict=True):
        if result is not None:
            pipe.send("end")
        process.join(LIMIT_S)
    return results


def test_ranks_of_a_node_share(tmp_path: Path) -> None:
    before = shared_memory()
    results = run(tmp_path, shared)
    assert results == [
        (0, 2, 2 * SIZE, bytes([100, 102])),
        (0, 1, SIZE, bytes([101, 0])),
        (1, 2, 2 * SIZE, bytes([100, 102])),
    ]
    assert shared_memory() <= before


@pytest.mark.parametrize("work", [without_memory, without_access])
def test_an_error_of_one_rank_is_everybodys(work: Callable[[int, Any], Any], tmp_path: Path) -> None:
    first, *others = run(tmp_path, work)
    assert [error for error, _ in others] == [first[0]] * 2
    assert [left for _, left in (first, *others)] == [[], [], []]


def test_a_killed_rank_leaves_nothing(tmp_path: Path) -> None:
    before = shared_memory()
    died, *others = run(tmp_path, killed)
    assert died is None
    assert others == [(7, 1), (7, 1)]
    assert shared_memory() <= before
