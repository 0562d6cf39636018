"""The host pool is taken while the worker loads its model: seconds that nobody has to wait for.

It is there when the model is, before vLLM measures device memory or captures graphs: what is registered costs
page tables on the device, and the driver takes no registration during a capture.
"""

import weakref
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_hisparse.config import HiSparseConfig

from .host_memory import begin_host_memory, release_host_memory, wait_for_host_memory
from .host_sharing import replica

__all__ = ["load_model"]

_without_hisparse = Worker.load_model


def load_model(self: Any, *, load_dummy_weights: bool = False) -> None:
    """Replaces `Worker.load_model`: vLLM's, with the pool of an engine with HiSparse pinned beside it.

    Raises ValueError before anything is loaded if the machine does not have the memory, and RuntimeError with
    the driver's reason. Whatever is raised, a stop by a signal too, the pool has been given back. If the
    engine fails later, before its KV caches are there, the pool goes with the worker.
    """
    if self.vllm_config.attention_config.hisparse_config is None:
        _without_hisparse(self, load_dummy_weights=load_dummy_weights)
        return
    num_bytes = HiSparseConfig.from_vllm_config(self.vllm_config).host_pool_bytes
    try:
        give_back = begin_host_memory(num_bytes, self.device.type == "cuda", replica())
        weakref.finalize(self, give_back)
        _without_hisparse(self, load_dummy_weights=load_dummy_weights)
        wait_for_host_memory()
    except BaseException:
        release_host_memory()
        raise
