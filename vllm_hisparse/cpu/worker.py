"""The CPU worker of DSA models."""

from __future__ import annotations

import os

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from .rows import make_rows_independent


class HiSparseCpuWorker(CPUWorker):
    """CPUWorker whose model gives a token the same bits in every batch."""

    def init_device(self) -> None:
        """Applies OMP_NUM_THREADS, which came too late for a process that was already there."""
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads the model, then makes its matrix products independent of the batch."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        make_rows_independent(self.model_runner.get_model())
