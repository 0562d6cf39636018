"""Single words of the tables that `resolve` reads, written between steps."""

from collections.abc import Sequence

import torch

from vllm_hisparse.ops.checks import ShapeCheck
from vllm_hisparse.ops.load import require_loaded


def write_words(words: torch.Tensor, at: Sequence[int], value: Sequence[int]) -> None:
    """words[at[i]] = value[i], in the order of the current stream; no copy to the device goes before it.

    words  int32 [n]  updated
    at     no index twice: of two the device may write either last
    value  as many, in the range of an int32

    The lists may change as soon as the call returns. Raises ValueError on a wrong dtype, shape or layout, an
    index or a value out of range, LibraryError when no library is loaded.
    """
    require_loaded()
    try:
        torch.ops.hisparse.write_words(words, at, value)
    except RuntimeError:
        check = ShapeCheck("write_words", words.device)
        check("words", words, torch.int32, ("n",))
        if len(at) != len(value):
            raise ValueError(
                f"write_words: got {len(at)} indices for {len(value)} values; need as many"
            ) from None
        for index, word in zip(at, value, strict=True):
            if not 0 <= index < words.numel() or not -(2**31) <= word < 2**31:
                raise ValueError(
                    f"write_words: got {word} for index {index}; need an int32 for one of 0 .. "
                    f"{words.numel() - 1} because the kernel writes there unseen"
                ) from None
        raise
