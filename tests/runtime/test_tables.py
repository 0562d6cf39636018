"""Page tables after deltas."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_hisparse.messages import PageWrite
from vllm_hisparse.runtime.tables import PageTables
from vllm_hisparse.runtime.transfer import to_device

SIZES: Any = SimpleNamespace(num_parts=2, max_requests=3, max_pages=4, num_regions=1, max_hot_blocks=1)


def test_every_part_gets_its_block_and_the_last_write_of_a_page_wins() -> None:
    tables = PageTables(SIZES, torch.device("cpu"))
    tables.write_pages(
        (
            PageWrite(2, 3, (7, 8), -1),
            PageWrite(0, 1, (5, 6), -1),
            PageWrite(2, 3, (-1, -1), 9),
        )
    )
    resident, host = torch.full((2, 3, 4), -1), torch.full((3, 4), -1)
    resident[0, 0, 1], resident[1, 0, 1] = 5, 6
    host[2, 3] = 9
    assert torch.equal(tables.resident.long(), resident)
    assert torch.equal(tables.host.long(), host)


def test_what_could_not_be_pinned_is_refused_on_every_device() -> None:
    """A CPU would take it, and CUDA fail in the first step."""
    with pytest.raises(TypeError, match="got ndarray; need a list or a tuple"):
        to_device(np.arange(3), torch.int32, torch.device("cpu"))  # type: ignore[arg-type]
