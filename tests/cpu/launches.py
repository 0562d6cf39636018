"""Launching an interpreted kernel and its stand-in on the same arguments."""

from typing import Any

import torch

from vllm_hisparse.cpu import kernels


def same(stand_in: kernels.StandIn, grid: tuple[int, ...], **arguments: Any) -> dict[str, Any]:
    """The arguments as the stand-in leaves them. The kernel has to leave the same bits, in every tensor."""
    kernels.register()
    interpreted, ours = ({name: _copy(value) for name, value in arguments.items()} for _ in range(2))
    kernels.originals[stand_in][grid](**interpreted)
    assert stand_in(**ours) is None, "it left the launch to the kernel"
    for name, value in interpreted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(bits(value), bits(ours[name])), f"{name}: {value} != {ours[name]}"
    return ours


def bits(x: torch.Tensor) -> torch.Tensor:
    """`x` as integers, which compare as NaNs do not."""
    return (
        x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]) if x.is_floating_point() else x
    )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
