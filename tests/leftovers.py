"""What a test may have left behind, told from what tests that run at the same time are using."""

import os

import torch.distributed as dist
from vllm.distributed.kv_transfer import has_kv_transfer_group

__all__ = ["globals_of_an_engine", "shared_memory"]

OTHERS = ("vllm_dist_", "psm_", "sem.mp-")  # message queues of vLLM's workers, and multiprocessing's


def shared_memory() -> set[str]:
    """Names in /dev/shm that neither vLLM nor Python gives."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(OTHERS)}


def globals_of_an_engine() -> list[str]:
    """What vLLM keeps in this process for an engine, and the next one would take for its own."""
    found = {"connector": has_kv_transfer_group(), "process group": dist.is_initialized()}
    return [name for name, is_there in found.items() if is_there]
