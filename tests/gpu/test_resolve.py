import pytest
import torch

from tests.gpu.scenario import SHAPES, Scenario, Shape

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_random_steps_equal_the_cpu_op(shape: Shape, num_steps: int) -> None:
    scenario = Scenario(shape, seed=7)
    for _ in range(num_steps):
        scenario.step(compare_pool=scenario.steps % 16 == 0)
    scenario.compare(("pool",))


@pytest.mark.parametrize("shape", SHAPES[:5], ids=lambda shape: shape.name)
def test_without_graphs(shape: Shape, num_steps: int) -> None:
    scenario = Scenario(shape, seed=8, use_graph=False)
    for _ in range(num_steps // 10 + 1):
        scenario.step(compare_pool=True)


def test_the_worked_example_of_lru() -> None:
    """B = 8, k = 4: 12 and 16 sit in s2 and s6, 25 misses, the newest is resident."""
    shape = Shape(4, 1, 8, 1, 4, 8, 0)
    scenario = Scenario(shape, device="cuda")
    gpu = scenario.gpu
    region = 0
    request = int((scenario.region == region).nonzero()[0])
    gpu["host"][request] = torch.arange(8, device="cuda")
    gpu["resident"][0, request, 7] = 3
    positions = torch.tensor([1, 2, 12, 4, 5, 6, 16, 8], dtype=torch.int32, device="cuda")
    gpu["position_of"][region] = positions
    gpu["slot_of"][region, positions.long()] = torch.arange(8, dtype=torch.int16, device="cuda")
    gpu["key"][region] = torch.arange(1, 9, device="cuda")  # previous order s0 .. s7
    gpu["clock"][region] = 10
    gpu["batch"][0] = torch.tensor([request, region, 8, 0])
    gpu["query_start"][1] = 1
    gpu["topk"][0] = torch.tensor([12, 16, 25, 31], device="cuda")
    scenario._run(gpu)
    order = sorted(range(8), key=lambda slot: (int(gpu["key"][region, slot]), slot))
    assert order == [1, 3, 4, 5, 7, 0, 2, 6]
    assert gpu["plan_slot"][0, 0].item() == 0
    assert gpu["plan_count"].tolist() == [1, 0]
    assert gpu["counts"].tolist()[:1] == [4]


def test_no_batch_rows_leave_padding_only() -> None:
    shape = Shape(33, 1, 64, 2, 16, 8, 0)
    gpu = Scenario(shape).gpu
    gpu["query_start"] = torch.zeros(1, dtype=torch.int32, device="cuda")
    for name in ("rows", "counts", "plan_count"):
        gpu[name].fill_(9)
    scenario = Scenario(shape)
    scenario._run(scenario.gpu | gpu)
    assert (gpu["rows"] == -1).all()
    assert (gpu["counts"] == 0).all()
    assert (gpu["plan_count"] == 0).all()


def test_a_million_positions() -> None:
    shape = Shape(2048, 1, 4096, 2, 64, 16384, 1)
    scenario = Scenario(shape, seed=3)
    for _ in range(20):
        scenario.step()


@pytest.mark.parametrize("entries", [(4096, 9), (2048, 17)])
def test_too_many_entries_are_refused(entries: tuple[int, int]) -> None:
    shape = Shape(entries[0], entries[1], 64, 1, 16, 400, 0)
    scenario = Scenario(shape)
    with pytest.raises(RuntimeError):
        scenario._run(scenario.gpu)
