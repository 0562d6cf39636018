"""Heat counts the pages that selections touch, request by request."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_hisparse.runtime.heat import HeatProbe
from vllm_hisparse.runtime.runtime import HiSparseRuntime
from vllm_hisparse.runtime.step import StepShape


@pytest.fixture
def probe() -> HeatProbe:
    layout: Any = SimpleNamespace(page_tokens=64, max_requests=4, max_pages=5)
    return HeatProbe(layout, torch.device("cpu"))


def selection(*rows: list[int]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)


def test_hottest_page_first(probe: HeatProbe) -> None:
    topk = selection([0, 64, 65, 66, 128, 129], [256, 319])
    assert probe.sample(topk, [0, 1], [2, 0]) == {2: (1, 2, 0), 0: (4,)}


def test_padding_counts_nothing(probe: HeatProbe) -> None:
    topk = selection([64, -1, 2**31 - 1, 5 * 64], [0, 0, 0, 0])  # out of range; then a row of nobody's
    assert probe.sample(topk, [0], [1]) == {1: (1,)}


def test_verify_rows_of_a_request_add_up(probe: HeatProbe) -> None:
    topk = selection([0, 64], [64, 128], [192, 192])
    heat = probe.sample(topk, [0, 1, 2], [3, 3, 1])
    assert heat[3][0] == 1
    assert sorted(heat[3]) == [0, 1, 2]
    assert heat[1] == (3,)


def test_recent_selections_weigh_more(probe: HeatProbe) -> None:
    probe.sample(selection([0, 1, 2]), [0], [0])
    assert probe.sample(selection([64, 65]), [0], [0]) == {0: (1, 0)}  # 2 against 3 halved


def test_a_new_owner_starts_cold(probe: HeatProbe) -> None:
    probe.sample(selection([0, 1, 2]), [0], [0])
    probe.forget([0])
    assert probe.sample(selection([300]), [0], [0]) == {0: (4,)}


def test_a_new_owner_gets_no_sample_of_the_last_one(probe: HeatProbe) -> None:
    """On a device a sample is reported when the next one is taken."""
    probe.sample(selection([0], [64]), [0, 1], [0, 1])
    arrived: Any = SimpleNamespace(query=lambda: True, record=lambda: None)
    probe._arrived = arrived
    probe.forget([1])
    assert probe.sample(selection([128], [192]), [0, 1], [2, 1]) == {0: (0,)}
    assert probe.sample(selection([0]), [], []) == {2: (2,), 1: (3,)}
    assert probe.sample(selection([0]), [], []) == {}


def runtime(probe: HeatProbe, verify_rows: int) -> Any:
    """What `HiSparseRuntime.sample_heat` looks at. Two leaders share a place for their selections, a
    drafter's has its own.
    """
    place, drafts = (torch.full((16, 2), -1, dtype=torch.int32) for _ in range(2))
    return SimpleNamespace(
        heat=probe,
        config=SimpleNamespace(verify_rows=verify_rows),
        groups=[SimpleNamespace(logical_topk_indices=place) for place in (place, place, drafts)],
        batch=[],
        step=StepShape(None, ()),
    )


def forward(runtime: Any, tokens: dict[int, int], rows: list[list[int]]) -> None:
    """A forward with so many tokens of each request slot, whose last leader selects `rows`. As in the replay
    of a graph, nothing but memory changes.
    """
    output: Any = SimpleNamespace(num_scheduled_tokens={str(slot): n for slot, n in tokens.items()})
    runtime.batch, runtime.step = list(tokens), StepShape(output, [str(slot) for slot in tokens])
    runtime.groups[0].logical_topk_indices[: len(rows)] = torch.tensor(rows, dtype=torch.int32)


def test_replays_of_any_batch(probe: HeatProbe) -> None:
    """Larger and smaller than the last: each is read as the batch that it is."""
    mine = runtime(probe, verify_rows=1)
    for tokens, rows, heat in (
        ({1: 1}, [[0, 1]], {1: (0,)}),
        ({3: 1, 0: 1, 2: 1}, [[64, 65], [128, 129], [192, 193]], {3: (1,), 0: (2,), 2: (3,)}),
        ({2: 1}, [[64, 65]], {2: (1, 3)}),
    ):
        forward(mine, tokens, rows)
        assert HiSparseRuntime.sample_heat(mine) == heat


def test_rows_of_drafts_and_prefills(probe: HeatProbe) -> None:
    """The verify rows of decodes count; those of a prefill, wherever it is in the batch, do not."""
    mine = runtime(probe, verify_rows=2)
    forward(mine, {1: 2, 2: 3, 0: 1}, [[0, 0], [64, 0], [256, 256], [256, 256], [256, 256], [128, 192]])
    mine.groups[2].logical_topk_indices[:] = 256
    assert HiSparseRuntime.sample_heat(mine) == {1: (0, 1), 0: (2, 3)}
    forward(mine, {2: 3}, [[256, 256]] * 3)
    assert HiSparseRuntime.sample_heat(mine) == {1: (0, 1), 0: (2, 3)}
    mine.batch = []
    assert HiSparseRuntime.sample_heat(mine) == {}
