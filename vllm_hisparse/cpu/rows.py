"""Matrix products whose rows do not depend on the batch they are in.

A CPU library picks a kernel by the shape of a product, and a row's rounding with it: one row alone (decode)
and the same row among others (prefill) differ in the last bits. Computing a fixed number of rows at a time,
padded with zeros, leaves a single shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ROWS = 16  # of every product


def in_row_blocks(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dim: int) -> torch.Tensor:
    """`product(x)` for a row-wise product, `ROWS` rows at a time along `dim` of argument and result."""
    num_rows = x.shape[dim]
    if num_rows == 0:
        return product(x)
    padding = list(x.shape)
    padding[dim] = -num_rows % ROWS
    blocks = torch.split(torch.cat([x, x.new_zeros(padding)], dim), ROWS, dim)
    return torch.cat([product(block.contiguous()) for block in blocks], dim).narrow(dim, 0, num_rows)


class BatchedWeight(torch.Tensor):
    """A weight [batch, k, n] on the right of `torch.bmm`, which then runs in row blocks."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.bmm:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        x, weight = args[0], args[1].as_subclass(torch.Tensor)
        result = in_row_blocks(lambda block: torch.bmm(block, weight), x, dim=1)
        out = kwargs.get("out")
        return result if out is None else out.copy_(result)


def make_rows_independent(model: torch.nn.Module) -> None:
    """Makes the linear layers and MLA's absorbed projections of a loaded model run in row blocks, in place.

    Experts need nothing: their kernels add up each row on its own.
    """
    for module in model.modules():
        linear = getattr(module, "cpu_linear", None)
        if linear is not None:
            module.cpu_linear = _blocked_linear(linear)  # type: ignore[assignment]
        for name in ("W_UK_T", "W_UV"):
            weight = getattr(module, name, None)
            if isinstance(weight, torch.Tensor):
                batched = weight.detach().as_subclass(BatchedWeight)
                setattr(module, name, torch.nn.Parameter(batched, requires_grad=False))


def _blocked_linear(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def blocked(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        result = in_row_blocks(lambda block: linear(block, weight, bias), rows, dim=0)
        return result.reshape(*x.shape[:-1], result.shape[-1])

    return blocked
