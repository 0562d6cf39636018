"""Random steps of one index group, run on the CPU op and on the device, and compared bit by bit after
every step.

The CPU op is the oracle: it is proven equal to `ops/reference.py` in tests/ops, and fast enough for 10,000
steps.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from tests.ops.case import batch_rows

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
POISON = 0x5A5A5A5A
OUTPUTS = ("rows", "counts", "plan_host_row", "plan_slot", "plan_count", "counters")
STATE = ("slot_of", "position_of", "key", "clock")
TABLES = ("topk", "query_start", "resident", "host", "hot", "batch")
RESOLVE = [
    "topk",
    "query_start",
    "rows",
    "counts",
    "resident",
    "host",
    "hot",
    "batch",
    "slot_of",
    "position_of",
    "key",
    "clock",
    "plan_host_row",
    "plan_slot",
    "plan_count",
    "counters",
]
FETCH = [
    "group_host",
    "pool",
    "layer_offset",
    "layer_part",
    "plan_host_row",
    "plan_slot",
    "plan_count",
    "batch",
    "hot",
    "topk",
    "query_start",
    "resident",
    "host",
    "slot_of",
]


@dataclass(frozen=True)
class Shape:
    """Extents of a scenario. `pages` is a request's context in pages; `slots` the largest hot region."""

    top_k: int
    verify_rows: int
    slots: int
    batch: int
    block_size: int
    pages: int
    policy: int
    parts: int = 1
    layers: int = 1
    row_bytes: int = 16

    @property
    def name(self) -> str:
        policy = ("lru", "lrfu")[self.policy]
        return (
            f"k{self.top_k}-v{self.verify_rows}-B{self.slots}-b{self.batch}-bs{self.block_size}-{policy}"
            f"-p{self.parts}-l{self.layers}"
        )

    @property
    def query_rows(self) -> int:
        """Room for every batch row's verify rows, for some prefill rows and for padding."""
        return self.batch * self.verify_rows + 2 * self.verify_rows + 5


SHAPES = (
    Shape(1, 1, 64, 3, 16, 40, 0),
    Shape(31, 3, 256, 4, 16, 60, 1, parts=2, layers=2),
    Shape(33, 4, 250, 3, 16, 60, 0, layers=3),
    Shape(65, 8, 602, 3, 24, 60, 1, parts=2, layers=4),
    Shape(2048, 1, 4096, 4, 64, 160, 0),
    Shape(2048, 1, 4096, 4, 64, 160, 1, layers=4),
    Shape(2048, 2, 8192, 2, 64, 300, 1, parts=2, layers=2),
    Shape(4096, 1, 6144, 2, 64, 200, 0),
    Shape(2048, 4, 10240, 1, 64, 300, 1),
    Shape(2048, 8, 16384, 1, 64, 400, 0),
    Shape(4096, 8, 32768, 1, 64, 700, 1),
    Shape(256, 1, 260, 2, 32, 9001, 1),  # ends amid a thread's slots; tables too long to share
)


@dataclass
class Scenario:
    """The same group on the CPU (`cpu`) and on the device (`gpu`); tensors by the names of the op's
    arguments."""

    shape: Shape
    seed: int = 0
    device: str = "cuda"
    use_graph: bool = True
    cpu: dict[str, torch.Tensor] = field(init=False)
    gpu: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self.rng = np.random.default_rng(self.seed)
        self.num_requests = shape.batch + 2
        self.num_regions = shape.batch + 1
        self.hot_blocks = -(-shape.slots // shape.block_size)
        self.host_blocks = shape.pages * 2
        self.layers_per_part = -(-shape.layers // shape.parts)
        # A page's layers lie in parts behind each other; every block has a page of padding.
        self.stride_rows = shape.block_size * (self.layers_per_part + 1)
        self.positions = shape.pages * shape.block_size
        self.cpu = self._tables() | self._state() | self._outputs() | self._memory()
        self.gpu = {name: self.cpu[name].to(self.device) for name in ("pool", "layer_offset", "layer_part")}
        self.gpu["group_host"] = self.cpu["group_host"]
        self.inputs = self._pack(TABLES)
        self.outputs = self._pack(OUTPUTS[:-1])
        self.state = [
            self._pack(("position_of", "key", "clock")),
            self._pack(("slot_of",)),
            self._pack(("counters",)),
        ]
        self.focus = self.rng.integers(0, self.positions, (self.num_requests, shape.top_k))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0

    def _tables(self) -> dict[str, torch.Tensor]:
        shape, rng = self.shape, self.rng
        host = rng.integers(0, self.host_blocks, (self.num_requests, shape.pages))
        host[rng.random(host.shape) < 0.02] = -1
        num_hot = shape.parts * self.num_regions * self.hot_blocks
        hot = rng.permutation(num_hot).reshape(shape.parts, self.num_regions, self.hot_blocks)
        self.num_slots = torch.full((self.num_regions,), shape.slots)
        self.region = torch.full((self.num_requests,), -1)
        owners = rng.permutation(self.num_requests)[: self.num_regions]
        self.region[owners] = torch.from_numpy(rng.permutation(self.num_regions))
        return {
            "topk": torch.full((shape.query_rows, shape.top_k), -1, dtype=torch.int32),
            "query_start": torch.zeros(shape.batch + 1, dtype=torch.int32),
            "resident": torch.full((shape.parts, self.num_requests, shape.pages), -1, dtype=torch.int32),
            "host": torch.from_numpy(host.astype(np.int32)),
            "hot": torch.from_numpy(hot.astype(np.int32)),
            "batch": torch.full((shape.batch + 1, 4), -1, dtype=torch.int32),
        }

    def _state(self) -> dict[str, torch.Tensor]:
        slots = (self.num_regions, self.shape.slots)
        return {
            "slot_of": torch.full((self.num_regions, self.positions), -1, dtype=torch.int16),
            "position_of": torch.full(slots, -1, dtype=torch.int32),
            "key": torch.full(slots, INT_MIN, dtype=torch.int32),
            "clock": torch.zeros(self.num_regions, dtype=torch.int32),
        }

    def _outputs(self) -> dict[str, torch.Tensor]:
        shape = self.shape
        capacity = min(shape.verify_rows * shape.top_k, shape.slots)
        return {
            "rows": torch.zeros(shape.parts, shape.query_rows, shape.top_k, dtype=torch.int32),
            "counts": torch.zeros(shape.query_rows, dtype=torch.int32),
            "plan_host_row": torch.zeros(shape.batch + 1, capacity, dtype=torch.int32),
            "plan_slot": torch.zeros(shape.batch + 1, capacity, dtype=torch.int32),
            "plan_count": torch.zeros(shape.batch + 1, dtype=torch.int32),
            "counters": torch.zeros(8, dtype=torch.int64),
        }

    def _memory(self) -> dict[str, torch.Tensor]:
        shape = self.shape
        host_rows = self.host_blocks * shape.block_size
        group_host = torch.randint(0, 256, (host_rows, shape.layers * shape.row_bytes), dtype=torch.uint8)
        blocks = shape.parts * self.num_regions * self.hot_blocks
        layer = torch.arange(shape.layers)
        page_bytes = shape.block_size * shape.row_bytes
        return {
            "group_host": group_host.pin_memory() if self.device == "cuda" else group_host,
            "pool": torch.zeros(blocks * self.stride_rows * shape.row_bytes, dtype=torch.uint8),
            "layer_offset": (layer % self.layers_per_part + 1) * page_bytes,
            "layer_part": (layer // self.layers_per_part).int(),
        }

    def _pack(self, names: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes these tensors views of one flat tensor a side: a step then costs few copies and
        comparisons."""
        views = [self.cpu[name] for name in names]
        starts = [0]
        for view in views:
            starts.append(starts[-1] + (view.numel() + 15) // 16 * 16)
        flat = torch.zeros(starts[-1], dtype=views[0].dtype)
        flat = flat.pin_memory() if self.device == "cuda" else flat
        both = flat, flat.to(self.device)
        for name, view, start in zip(names, views, starts, strict=False):
            flat[start : start + view.numel()] = view.reshape(-1)
            for side, memory in zip((self.cpu, self.gpu), both, strict=True):
                side[name] = memory[start : start + view.numel()].view(view.shape)
        both[1].copy_(flat)
        return both

    # -- a step's inputs --

    def _selection(self, request: int, num_rows: int) -> np.ndarray:
        """A drifting focus, shared in large part by the query rows, with padding and junk among it."""
        shape, rng = self.shape, self.rng
        focus = self.focus[request]
        churn = rng.choice([0.0, 0.02, 0.05, 0.3], p=[0.3, 0.3, 0.3, 0.1])
        changed = np.flatnonzero(rng.random(shape.top_k) < churn)
        focus[changed] = rng.integers(0, self.positions, changed.size)
        rows = np.repeat(focus[None], num_rows, axis=0)
        if num_rows > 1:
            changed = rng.random(rows.shape) < 0.05
            rows[changed] = rng.integers(0, self.positions, int(changed.sum()))
        kind = rng.random()
        if kind < 0.3:
            junk = rng.random(rows.shape) < 0.05
            rows[junk] = rng.choice(
                [-1, -7, INT_MIN, INT_MAX, self.positions, self.positions + 9], int(junk.sum())
            )
        elif kind < 0.4:
            rows[:, rng.integers(0, shape.top_k) :] = -1  # a short selection
        elif kind < 0.45:
            rows[rng.integers(0, num_rows)] = rows[0, 0]  # one position only
        elif kind < 0.5:
            rows[:] = -1
        return rows

    def _new_inputs(self) -> None:
        shape, rng, cpu = self.shape, self.rng, self.cpu
        requests = rng.permutation(self.num_requests)[: shape.batch]
        row_request = np.where(rng.random(shape.batch) < 0.05, -1, requests)
        num_rows = rng.integers(1, shape.verify_rows + 1, shape.batch)
        if rng.random() < 0.1:  # one row that is prefill, not a decode row
            num_rows[rng.integers(0, shape.batch)] = shape.verify_rows + rng.integers(1, 4)
        start = np.concatenate([[0], np.cumsum(num_rows)])
        topk = rng.integers(-5, self.positions + 5, (shape.query_rows, shape.top_k))
        for r, request in enumerate(row_request):
            topk[start[r] : start[r + 1]] = self._selection(
                int(requests[r] if request < 0 else request), num_rows[r]
            )
        cpu["topk"].copy_(torch.from_numpy(topk.astype(np.int32)))
        cpu["query_start"].copy_(torch.from_numpy(start.astype(np.int32)))
        cpu["batch"][: shape.batch].copy_(
            batch_rows(torch.from_numpy(row_request), self.region, self.num_slots)
        )

    def _new_pages(self) -> None:
        """Pages come to and leave the device; host blocks change hands; regions grow, shrink and forget."""
        shape, rng, cpu = self.shape, self.rng, self.cpu
        for _ in range(rng.integers(0, 3)):
            request, page = rng.integers(0, self.num_requests), rng.integers(0, shape.pages)
            here = rng.random() < 0.4
            for part in range(shape.parts):
                cpu["resident"][part, request, page] = int(rng.integers(0, 1000)) if here else -1
        if rng.random() < 0.03:
            request = int(rng.integers(0, self.num_requests))
            cpu["resident"][:, request] = 7 if rng.random() < 0.2 else -1  # all on the device, or nothing
        if rng.random() < 0.05:
            request, page = rng.integers(0, self.num_requests), rng.integers(0, shape.pages)
            cpu["host"][request, page] = int(rng.integers(-1, self.host_blocks))
        if rng.random() < 0.05:
            self._resize(int(rng.integers(0, self.num_regions)))
        if rng.random() < 0.05:
            region, position = (
                int(rng.integers(0, self.num_regions)),
                int(rng.integers(0, self.positions + 1)),
            )
            self._forget([region], [shape.slots], [position])
        if rng.random() < 0.01:
            self._forget([int(rng.integers(0, self.num_regions))], [0], [INT_MAX])

    def _resize(self, region: int) -> None:
        old = int(self.num_slots[region])
        some = self.rng.integers(0, self.shape.slots)
        size = int(self.rng.choice([0, 1, self.shape.top_k, some, *[self.shape.slots] * 6]))
        size = min(size, self.shape.slots)
        if size < old:
            self._forget([region], [size], [INT_MAX])
        self.num_slots[region] = size

    def _forget(self, regions: list[int], slots: list[int], positions: list[int]) -> None:
        lists = [torch.tensor(values, dtype=torch.int32) for values in (regions, slots, positions)]
        torch.ops.hisparse.forget(*(self.cpu[name] for name in STATE), *lists)
        torch.ops.hisparse.forget(*(self.gpu[name] for name in STATE), *(t.to(self.device) for t in lists))

    # -- running and comparing --

    def _run(self, side: dict[str, torch.Tensor]) -> None:
        shape = self.shape
        torch.ops.hisparse.resolve(
            *(side[name] for name in RESOLVE),
            list(range(shape.parts)),
            shape.block_size,
            self.stride_rows,
            shape.verify_rows,
            shape.policy,
        )
        torch.ops.hisparse.fetch_selected(
            *(side[name] for name in FETCH),
            0,
            shape.row_bytes,
            shape.block_size,
            self.stride_rows * shape.row_bytes,
            False,
        )

    def _run_device(self) -> None:
        if self.device != "cuda" or not self.use_graph or self.steps < 3 or self.steps % 4 == 0:
            self._run(self.gpu)
            return
        if self.graph is None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._run(self.gpu)
        self.graph.replay()

    def step(self, compare_pool: bool = False) -> None:
        """One step on both sides. Raises AssertionError naming the first differing coordinate."""
        self._new_pages()
        self._new_inputs()
        self.inputs[1].copy_(self.inputs[0])
        for memory in self.outputs:
            memory.fill_(POISON)
        self._run(self.cpu)
        self._run_device()
        self.steps += 1
        pairs = (self.outputs, *self.state)
        if not all(torch.equal(got, expected.to(self.device)) for expected, got in pairs):
            self.compare((*OUTPUTS, *STATE))
            raise AssertionError(f"{self.shape.name}: step {self.steps}: a write behind a tensor")
        if compare_pool:
            self.compare(("pool",))

    def compare(self, names: tuple[str, ...]) -> None:
        expected = [self.cpu[name].to(self.device, non_blocking=False) for name in names]
        differs = torch.stack([(self.gpu[n] != e).any() for n, e in zip(names, expected, strict=True)])
        if not bool(differs.any()):
            return
        for name, wanted in zip(names, expected, strict=True):
            where = (self.gpu[name] != wanted).nonzero()
            if len(where):
                at = tuple(where[0].tolist())
                got, want = self.gpu[name][at].item(), wanted[at].item()
                message = f"step {self.steps}: {name}{list(at)} is {got}, not {want}; {len(where)} differ"
                raise AssertionError(f"{self.shape.name}: {message}")
