"""Small host values on their way to the device, without stopping it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["to_device"]


def to_device(values: Sequence[Any] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `values` on `device`, in the order of the current stream.

    On CUDA it goes through pinned memory, which the caching host allocator keeps until the copy has been
    made: a copy from pageable memory would make the caller wait for everything queued before it.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
