"""Rows that fetch reads before the resolver has ended: the same bytes, whatever runs between and beside."""

import pytest
import torch

from tests.gpu.scenario import FETCH, RESOLVE, Scenario, Shape

pytestmark = pytest.mark.gpu

SHAPES = (
    Shape(1, 1, 64, 3, 16, 40, 0),
    Shape(31, 1, 256, 4, 16, 60, 1, parts=2, layers=2),
    Shape(33, 2, 250, 3, 16, 60, 0, layers=3),  # one query row in some batch rows, two in others
    Shape(65, 1, 600, 70, 24, 60, 1, row_bytes=32),  # more batch rows than are looked up early
    Shape(2048, 1, 4096, 1, 64, 160, 1, row_bytes=656),
    Shape(2048, 1, 4096, 9, 64, 160, 0, layers=4, row_bytes=656),
    Shape(2048, 1, 1024, 2, 64, 160, 1, row_bytes=1152),  # fewer slots than a step wants
    Shape(2048, 1, 4096, 2, 64, 160, 1, layers=4, row_bytes=1152),  # rows that do not fit into registers
)


class Disturbed(Scenario):
    """`how`: apart: another kernel between resolve and fetch; resolve twice; fetch twice; beside: kernels of
    another stream take SMs."""

    how = ""

    def _run(self, side: dict[str, torch.Tensor]) -> None:
        shape = self.shape
        parts, strides = list(range(shape.parts)), (shape.block_size, self.stride_rows)
        sizes = (parts, *strides, shape.verify_rows, shape.policy)
        for _ in range(2 if self.how == "resolve twice" else 1):
            torch.ops.hisparse.resolve(*(side[name] for name in RESOLVE), *sizes)
        if self.how == "apart":
            side["counters"].add_(0)
        row_sizes = (shape.row_bytes, shape.block_size, self.stride_rows * shape.row_bytes)
        for _ in range(2 if self.how == "fetch twice" else 1):
            torch.ops.hisparse.fetch_selected(*(side[name] for name in FETCH), 0, *row_sizes, False)


@pytest.mark.parametrize("how", ["", "apart", "resolve twice", "fetch twice", "beside"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_bytes_are_those_of_the_cpu_op(shape: Shape, how: str, num_steps: int) -> None:
    scenario = Disturbed(shape, seed=9)
    scenario.how = how
    aside, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(num_steps // 10 + 1):
        if how == "beside":
            with torch.cuda.stream(aside):
                torch.mm(matrix, matrix)
        scenario.step(compare_pool=True)
