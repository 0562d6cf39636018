"""A random world for the ops: tables, the state of two index groups, and steps that change both."""

from dataclasses import dataclass, field, fields, replace
from types import ModuleType

import numpy as np
import torch

from vllm_hisparse import ops

POISON = -77
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def int32(*shape: int, fill: int = POISON) -> torch.Tensor:
    return torch.full(shape, fill, dtype=torch.int32)


def first_difference(name: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
    """None if both are bitwise equal, else the first coordinate where they differ, with both values."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{name}: got {got.dtype} {tuple(got.shape)}; need {want.dtype} {tuple(want.shape)}"
    different = (got != want).nonzero()
    if len(different) == 0:
        return None
    at = tuple(different[0].tolist())
    return f"{name}{list(at)}: got {got[at].item()}; need {want[at].item()} ({len(different)} differ)"


@dataclass
class Geometry:
    """Sizes of a world; positions of a request are 0 .. max_pages * block_size - 1."""

    block_size: int = 8
    max_pages: int = 16
    max_requests: int = 4
    num_regions: int = 3
    max_slots: int = 40
    num_parts: int = 2
    top_k: int = 8
    max_query_rows: int = 4

    @property
    def max_positions(self) -> int:
        return self.max_pages * self.block_size

    @property
    def max_hot_blocks(self) -> int:
        return -(-self.max_slots // self.block_size)

    @property
    def block_stride_rows(self) -> int:
        return 3 * self.block_size + 1

    @property
    def plan_capacity(self) -> int:
        return min(self.max_query_rows * self.top_k, self.max_slots)


@dataclass
class Tables:
    """Shared by the index groups. Shapes as in `ops.resolve`."""

    resident: torch.Tensor
    host: torch.Tensor
    hot: torch.Tensor
    hot_rows: torch.Tensor  # int32 [num_regions] usable slots
    hot_region: torch.Tensor  # int32 [max_requests] region, -1: none

    def given(self, row_request: torch.Tensor) -> dict[str, torch.Tensor]:
        """Arguments of `ops.resolve` for batch rows of these requests."""
        batch = batch_rows(row_request, self.hot_region, self.hot_rows)
        return {"resident": self.resident, "host": self.host, "hot": self.hot, "batch": batch}


def batch_rows(row_request: torch.Tensor, hot_region: torch.Tensor, hot_rows: torch.Tensor) -> torch.Tensor:
    """int32 [rows, 4], `ops.resolve`'s `batch`, of each row's request, its region and the region's slots."""
    request = row_request.long()
    region = torch.where(request >= 0, hot_region[request.clamp_min(0)], -1).long()
    num_slots = torch.where(region >= 0, hot_rows[region.clamp_min(0)], 0)
    return ops.make_batch(request, region, num_slots)


@dataclass
class State:
    """One index group's."""

    slot_of: torch.Tensor
    position_of: torch.Tensor
    key: torch.Tensor
    clock: torch.Tensor

    @classmethod
    def empty(cls, geometry: Geometry) -> "State":
        g = geometry
        return cls(
            slot_of=torch.full((g.num_regions, g.max_positions), -1, dtype=torch.int16),
            position_of=int32(g.num_regions, g.max_slots, fill=-1),
            key=int32(g.num_regions, g.max_slots, fill=ops.EMPTY_KEY),
            clock=int32(g.num_regions, fill=0),
        )

    def clone(self) -> "State":
        return State(**{f.name: getattr(self, f.name).clone() for f in fields(self)})

    def check_integrity(self, hot_rows: torch.Tensor) -> None:
        for n, positions in enumerate(self.position_of.tolist()):
            slots = {p: s for s, p in enumerate(positions) if p >= 0}
            held = self.slot_of[n].tolist()
            assert slots == {p: s for p, s in enumerate(held) if s >= 0}
            assert all(s < hot_rows[n] for s in slots.values())
            assert all(
                (p < 0) == (k == ops.EMPTY_KEY) for p, k in zip(positions, self.key[n].tolist(), strict=True)
            )


@dataclass
class Outputs:
    """What `resolve` writes besides the state; poisoned before each call."""

    rows: torch.Tensor
    counts: torch.Tensor
    plan_host_row: torch.Tensor
    plan_slot: torch.Tensor
    plan_count: torch.Tensor
    counters: torch.Tensor = field(default_factory=lambda: torch.arange(8))

    @classmethod
    def poisoned(
        cls, geometry: Geometry, num_query_rows: int, num_plan_rows: int, num_parts: int
    ) -> "Outputs":
        return cls(
            rows=int32(num_parts, num_query_rows, geometry.top_k),
            counts=int32(num_query_rows),
            plan_host_row=int32(num_plan_rows, geometry.plan_capacity),
            plan_slot=int32(num_plan_rows, geometry.plan_capacity),
            plan_count=int32(num_plan_rows),
        )


@dataclass
class Step:
    topk: torch.Tensor
    query_start: torch.Tensor
    row_request: torch.Tensor  # int32 [batch rows] or more: request of a batch row, -1: none


def random_tables(geometry: Geometry, random: np.random.Generator) -> Tables:
    g = geometry
    num_pages = g.max_requests * g.max_pages
    blocks = random.permutation(g.num_parts * (num_pages + g.num_regions * g.max_hot_blocks))
    resident, hot = np.split(blocks, [g.num_parts * num_pages])
    resident = resident.reshape(g.num_parts, g.max_requests, g.max_pages)
    resident[:, random.random((g.max_requests, g.max_pages)) < 0.6] = -1
    host = random.permutation(num_pages).reshape(g.max_requests, g.max_pages)
    host[random.random(host.shape) < 0.1] = -1
    regions = np.full(g.max_requests, -1)
    owners = random.permutation(g.max_requests)[: g.num_regions]
    regions[owners] = random.permutation(g.num_regions)[: len(owners)]
    hot_rows = random.integers(0, g.max_slots + 1, g.num_regions)
    return Tables(
        resident=torch.tensor(resident, dtype=torch.int32),
        host=torch.tensor(host, dtype=torch.int32),
        hot=torch.tensor(hot.reshape(g.num_parts, g.num_regions, g.max_hot_blocks), dtype=torch.int32),
        hot_rows=torch.tensor(hot_rows, dtype=torch.int32),
        hot_region=torch.tensor(regions, dtype=torch.int32),
    )


def random_step(geometry: Geometry, random: np.random.Generator) -> Step:
    """Batch rows of 0 .. max_query_rows + 1 query rows, padding rows, odd indices."""
    g = geometry
    num_batch_rows = int(random.integers(0, g.max_requests + 2))
    requests = np.full(num_batch_rows, -1)
    real = min(num_batch_rows, g.max_requests)
    requests[random.permutation(num_batch_rows)[:real]] = random.permutation(g.max_requests)[:real]
    lengths = random.integers(0, g.max_query_rows + 2, num_batch_rows)
    num_padding_rows = int(random.integers(0, 3))
    num_query_rows = int(lengths.sum()) + num_padding_rows
    spread = int(random.integers(1, g.max_positions + 1))  # a small one repeats positions a lot
    topk = random.integers(0, spread, (num_query_rows, g.top_k))
    odd = random.choice([-1, INT_MIN, INT_MAX, g.max_positions, -2, g.max_positions - 1], topk.shape)
    topk = np.where(random.random(topk.shape) < 0.2, odd, topk)
    topk[random.random(num_query_rows) < 0.1] = -1
    return Step(
        topk=torch.tensor(topk.reshape(num_query_rows, g.top_k), dtype=torch.int32),
        query_start=torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32),
        row_request=torch.tensor(np.concatenate([requests, [-1]]), dtype=torch.int32),
    )


def run_resolve(
    implementation: ModuleType,
    geometry: Geometry,
    tables: Tables,
    state: State,
    step: Step,
    policy: ops.Policy,
    parts: tuple[int, ...] = (0,),
) -> Outputs:
    outputs = Outputs.poisoned(geometry, len(step.topk), len(step.row_request), len(parts))
    implementation.resolve(
        topk=step.topk,
        query_start=step.query_start,
        **tables.given(step.row_request),
        **vars(state),
        **vars(outputs),
        parts=parts,
        block_size=geometry.block_size,
        block_stride_rows=geometry.block_stride_rows,
        max_query_rows=geometry.max_query_rows,
        policy=policy,
    )
    return outputs


def assert_same(got: object, want: object) -> None:
    """Bitwise equality of two dataclasses of tensors."""
    differences = (
        first_difference(f.name, getattr(got, f.name), getattr(want, f.name)) for f in fields(want)
    )
    found = [difference for difference in differences if difference]
    assert not found, "\n".join(found)


def resized(tables: Tables, region: int, num_slots: int) -> Tables:
    hot_rows = tables.hot_rows.clone()
    hot_rows[region] = num_slots
    return replace(tables, hot_rows=hot_rows)
