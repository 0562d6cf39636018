"""vLLM's OffloadingConnector on the CPU, with copies that are made as late as a device's copy stream might.

vLLM refuses it there, because its worker drives CUDA streams. Scheduler, manager, worker and the handler that
computes every copy are vLLM's here; streams, events and the batched copy of bytes are ours. They come in by
the connector's own options, `spec_name` and `spec_module_path`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from vllm_hisparse.config import MIB

__all__ = ["HostOffloadingSpec", "offloading"]


def offloading(mib: float = 16.0, **options: Any) -> dict[str, Any]:
    """Configuration of an OffloadingConnector that this module serves, with `mib` MiB of host memory.

    `copy_delay`: looks at a copy until it is seen to have ended, 2 by default.
    """
    extra = {
        "spec_name": HostOffloadingSpec.__name__,
        "spec_module_path": __name__,
        "cpu_bytes_to_use": int(mib * MIB),
        **options,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class HostOffloadingSpec(CPUOffloadingSpec):
    """vLLM's spec, for KV caches in this process's memory."""

    BLOCK_SIZE_ALIGNMENT = 1  # no memory is mapped

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._copy_delay = int(config.extra_config.get("copy_delay", 2))
        self._host_worker: HostOffloadingWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this rank, made once."""
        if self._host_worker is None:
            tensors = [replace(t, tensor=t.tensor.as_subclass(_DeviceTensor)) for t in kv_caches.tensors]
            self._host_worker = HostOffloadingWorker(
                LateStream(self._copy_delay),
                replace(kv_caches, tensors=tensors),
                self.blocks_per_chunk,
                self.num_chunks,
            )
        return self._host_worker


class HostOffloadingWorker(gpu_worker.CPUOffloadingWorker):
    """vLLM's worker, its copies submitted to `stream`."""

    def __init__(self, stream: LateStream, *args: Any) -> None:
        self.stream = stream
        with self._on_host():
            super().__init__(*args)
        for handler in vars(self).values():
            if isinstance(handler, gpu_worker.SingleDirectionOffloadingHandler):
                handler._swap_blocks_batch = stream.submit

    def submit_store(self, *args: Any, **kwargs: Any) -> bool:
        """See vLLM's."""
        with self._on_host():
            return super().submit_store(*args, **kwargs)

    def submit_load(self, *args: Any, **kwargs: Any) -> bool:
        """See vLLM's."""
        with self._on_host():
            return super().submit_load(*args, **kwargs)

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        """vLLM's module sees our stream and events in the place of the platform's."""
        with (
            patch.object(gpu_worker, "current_platform", _Platform(self.stream)),
            patch.object(gpu_worker, "torch", _Torch(self.stream)),
        ):
            yield


class LateStream:
    """Copies in order of submission, made when somebody waits for one of them, or `delay` looks later.

    The same for streams of both directions: on a device their order is free, here it is one that is allowed.
    """

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.num_waited = 0  # copies that were made because a step had to wait for them
        self._copies: list[Callable[[], None]] = []  # not made yet
        self._num_made = 0

    @property
    def num_submitted(self) -> int:
        """Copies since start."""
        return self._num_made + len(self._copies)

    def submit(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, **hints: bool
    ) -> None:
        """Copy `sizes` bytes from and to these addresses, all int64 [n]; they stay ours until then."""
        columns = [sources.tolist(), targets.tolist(), sizes.tolist()]
        self._copies.append(lambda: _copy(*columns))

    def make(self, num_copies: int) -> None:
        """Make the first `num_copies` copies since start."""
        while self._num_made < num_copies:
            self._copies.pop(0)()
            self._num_made += 1

    def wait_stream(self, other: object) -> None:
        """The forward is over when a copy is submitted: it runs in this thread."""

    def wait_event(self, event: object) -> None:
        """Copies are made in order."""


class LateEvent:
    """Recorded behind the copies submitted so far."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self._num_copies = 0
        self._num_looks = 0

    def record(self, stream: LateStream) -> None:
        self._num_copies, self._num_looks = stream.num_submitted, 0

    def query(self) -> bool:
        self._num_looks += 1
        if self._num_looks > self._stream.delay:
            self._stream.make(self._num_copies)
        return self._stream._num_made >= self._num_copies

    def synchronize(self) -> None:
        self._stream.num_waited += max(self._num_copies - self._stream._num_made, 0)
        self._stream.make(self._num_copies)

    def elapsed_time(self, end: LateEvent) -> float:
        return 1.0


class _DeviceTensor(torch.Tensor):
    """A view of a KV cache that passes for device memory."""

    is_cuda = True


class _Platform:
    """What vLLM's handler asks of the platform."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream

    def Stream(self) -> LateStream:  # noqa: N802
        return self._stream

    def current_stream(self) -> None:
        return None

    def stream(self, stream: LateStream) -> Any:
        return nullcontext()

    def is_xpu(self) -> bool:
        return False

    def is_rocm(self) -> bool:
        return False


class _Torch:
    """torch, but for its events."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream

    def Event(self, enable_timing: bool) -> LateEvent:  # noqa: N802
        return LateEvent(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _copy(sources: list[int], targets: list[int], sizes: list[int]) -> None:
    for source, target, size in zip(sources, targets, sizes, strict=True):
        ctypes.memmove(target, source, size)
