"""Heat counts the pages that selections touch, request by request."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_hisparse.runtime.heat import HeatProbe


@pytest.fixture
def probe() -> HeatProbe:
    layout: Any = SimpleNamespace(page_tokens=64, max_requests=4, max_pages=5)
    return HeatProbe(layout, torch.device("cpu"))


def selection(*rows: list[int]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)


def starts(*bounds: int) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def test_hottest_page_first(probe: HeatProbe) -> None:
    topk = selection([0, 64, 65, 66, 128, 129], [256, 319])
    assert probe.sample(topk, starts(0, 1, 2), [2, 0]) == {2: (1, 2, 0), 0: (4,)}


def test_padding_counts_nothing(probe: HeatProbe) -> None:
    topk = selection(
        [64, -1, 2**31 - 1, 5 * 64], [0, 0, 0, 0]
    )  # out of range; then a row that no request owns
    assert probe.sample(topk, starts(0, 1), [1]) == {1: (1,)}


def test_verify_rows_of_a_request_add_up(probe: HeatProbe) -> None:
    topk = selection([0, 64], [64, 128], [192, 192])
    heat = probe.sample(topk, starts(0, 2, 3), [3, 1])
    assert heat[3][0] == 1
    assert sorted(heat[3]) == [0, 1, 2]
    assert heat[1] == (3,)


def test_recent_selections_weigh_more(probe: HeatProbe) -> None:
    probe.sample(selection([0, 1, 2]), starts(0, 1), [0])
    assert probe.sample(selection([64, 65]), starts(0, 1), [0]) == {0: (1, 0)}  # 2 against 3 halved


def test_a_new_owner_starts_cold(probe: HeatProbe) -> None:
    probe.sample(selection([0, 1, 2]), starts(0, 1), [0])
    probe.forget([0])
    assert probe.sample(selection([300]), starts(0, 1), [0]) == {0: (4,)}
