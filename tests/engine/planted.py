"""What tests change or look at inside the worker processes of a running engine: run by `collective_rpc`."""

import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from vllm_hisparse.runtime.host_sharing import NAME
from vllm_hisparse.testing.harness import LateCopies

__all__ = ["Deaf", "late", "nobody_waits", "pool"]


class Deaf(LateCopies):
    """Copies that nobody waits for."""

    def wait(self, transfer_ids: tuple[int, ...]) -> None:
        self.num_waited += len(transfer_ids)


def late(worker: Any) -> None:
    """Each rank's part of a copy is made as late as it may be."""
    get_kv_transfer_group().worker._copies = LateCopies()


def nobody_waits(worker: Any) -> None:
    """The same, but pages are read whether they are written or not."""
    get_kv_transfer_group().worker._copies = Deaf()


def pool(worker: Any) -> tuple[int, list[str]]:
    """(process, inodes of the host pools that it has mapped)."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return os.getpid(), [line.split()[4] for line in maps if NAME in line]
