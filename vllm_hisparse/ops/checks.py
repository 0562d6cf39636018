"""Checks of tensors before their raw memory reaches a kernel. They read metadata only."""

from collections.abc import Sequence

import torch


class ShapeCheck:
    """Checks the tensors of one call against named extents.

    A shape is a sequence of extents. An extent is a number, or a name: the first tensor that uses a name
    fixes its value, later ones must agree. A name that ends in "+" asks for at least the value of the name.
    """

    def __init__(self, op: str, device: torch.device) -> None:
        self.op = op
        self.device = device
        self.extents: dict[str, int] = {}

    def __call__(
        self,
        name: str,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        shape: Sequence[str | int],
        device: torch.device | None = None,
    ) -> None:
        """Raises ValueError unless `tensor` is contiguous, of `dtype` and `shape`, and where it should be."""
        device = device or self.device
        if (
            tensor.dtype is dtype
            and tensor.device == device
            and tensor.dim() == len(shape)
            and all(self._fits(got, extent) for got, extent in zip(tensor.shape, shape, strict=True))
            and tensor.is_contiguous()
        ):
            for got, extent in zip(tensor.shape, shape, strict=True):
                if isinstance(extent, str) and not extent.endswith("+"):
                    self.extents.setdefault(extent, got)
            return
        need = ", ".join(self._describe(extent) for extent in shape)
        layout = "" if tensor.is_contiguous() else f" with strides {tuple(tensor.stride())}"
        raise ValueError(
            f"{self.op}: got {name} {tensor.dtype} {list(tensor.shape)}{layout} on {tensor.device}; "
            f"need {dtype} [{need}], contiguous, on {device}, because the kernel reads its raw memory as such"
        )

    def aligned(self, name: str, tensor: torch.Tensor, num_bytes: int) -> None:
        if tensor.data_ptr() % num_bytes:
            raise ValueError(
                f"{self.op}: got {name} {tensor.data_ptr() % num_bytes} bytes behind a multiple of "
                f"{num_bytes}; need one at a multiple because the kernel loads as much at once"
            )

    def positive(self, **values: int) -> None:
        for name, value in values.items():
            if not 0 < value < 2**31:
                raise ValueError(
                    f"{self.op}: got {name} {value}; need 1 .. 2^31 - 1 because it is a size in 32 bits"
                )

    def _fits(self, got: int, extent: str | int) -> bool:
        if isinstance(extent, int):
            return got == extent
        if extent.endswith("+"):
            return got >= self.extents[extent[:-1]]
        return got == self.extents.get(extent, got)

    def _describe(self, extent: str | int) -> str:
        if isinstance(extent, int):
            return str(extent)
        value = self.extents.get(extent.rstrip("+"))
        sign = ">=" if extent.endswith("+") else "="
        return extent.rstrip("+") if value is None else f"{extent.rstrip('+')} {sign} {value}"
