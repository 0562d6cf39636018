"""Small host values on their way to the device, without stopping it."""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["to_device"]


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `values` on `device`, in the order of the current stream.

    On CUDA it goes through pinned memory, which the caching host allocator keeps until the copy has been
    made: a copy from pageable memory would make the caller wait for everything queued before it. Raises
    TypeError for what is no list or tuple: torch pins no array of numpy, which would show on CUDA only.
    """
    if not isinstance(values, list | tuple):
        raise TypeError(f"got {type(values).__name__}; need a list or a tuple because torch pins no other")
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
