"""One of two ranks that share a pinned pool: a program of its own, started by test_shared_pool.py.

    python tests/gpu/shared_pool.py RANK FOLDER DEAF

Rank 0 writes a number to the whole pool in each step, as a page copy does, and both read it in the step's
forward. Both are slow at times, so that a wait that is left out shows. Prints how many reads were wrong.
DEAF: the rank that does not wait, or -1.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vllm_hisparse.runtime.host_memory import HostMemory
from vllm_hisparse.worker.copies import StreamCopies

NUM_RANKS = 2
NUM_STEPS = 60
NUM_INTS = 1 << 20
SLOW_CYCLES = 20_000_000  # about 10 ms


def write(pool: torch.Tensor, values: torch.Tensor, step: int) -> None:
    values.fill_(step)
    if step % 3 == 0:
        torch.cuda._sleep(SLOW_CYCLES)
    pool.copy_(values, non_blocking=True)


def main() -> None:
    rank, folder, deaf = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    memory = HostMemory(4 * NUM_INTS, True, dist.group.WORLD)
    memory.wait()
    turns: Any = memory.turns
    assert turns.num_ranks == NUM_RANKS and turns.is_writer == (rank == 0)
    if rank == deaf:
        turns._words.wait = lambda word, value: None
    pool = memory.tensor.view(torch.int32)
    assert pool.is_pinned()
    values = torch.zeros(NUM_INTS, dtype=torch.int32, device=device)
    seen = torch.zeros_like(values)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    copies = StreamCopies(device)
    dist.barrier()
    for step in range(1, NUM_STEPS):
        turns.begin()
        copies.submit(step, partial(turns.take, partial(write, pool, values, step)))
        copies.wait((step,))
        if rank == 1 and step % 3 == 1:
            torch.cuda._sleep(SLOW_CYCLES)
        seen.copy_(pool, non_blocking=True)
        wrong += (seen != step).any()
    print(int(wrong.item()))
    dist.barrier()


if __name__ == "__main__":
    main()
