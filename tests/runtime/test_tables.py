"""Page tables after deltas."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm_hisparse.messages import PageWrite
from vllm_hisparse.runtime.tables import PageTables

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
