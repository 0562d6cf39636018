"""A producer without an engine: memory, a real NIXL agent, and vLLM's own handshake listener."""

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlAgentMetadata, NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

from tests.servers import free_port
from vllm_hisparse.peers.addresses import ABSENT
from vllm_hisparse.peers.marks import Marks
from vllm_hisparse.peers.messages import Peer
from vllm_hisparse.peers.wire import MARKS_REGION, device_region, host_region
from vllm_hisparse.planning.geometry import Shape, make_geometry
from vllm_hisparse.planning.layout import Layout
from vllm_hisparse.runtime.memory import Memory

__all__ = ["COMPATIBILITY", "Producer", "make_layout", "producer"]

PAGE_TOKENS, ROW_BYTES, KEY_BYTES = 4, 48, 16
COMPATIBILITY = "the same"
NUM_BLOCKS = 40  # of every region of a plain producer


def make_layout(groups: Sequence[int], num_parts: int) -> Layout:
    """Index groups of so many layers each, in `num_parts` parts."""
    layers = [f"layers.{i}.attn" for i in range(sum(groups))]
    ends = [sum(groups[: g + 1]) for g in range(len(groups))]
    shape = Shape(
        num_layers=len(layers),
        num_indexer_layers=len(groups),
        row_bytes=ROW_BYTES,
        indexer_row_bytes=KEY_BYTES,
        page_tokens=PAGE_TOKENS,
    )
    return Layout(
        geometry=make_geometry(shape, num_parts, 1),
        layers=tuple(layers),
        index_groups=tuple(tuple(layers[end - n : end]) for n, end in zip(groups, ends, strict=True)),
        indexer_layers=tuple(f"layers.{i}.indexer" for i in range(len(groups))),
        num_device_blocks=64,
        num_host_blocks=50,
        max_requests=4,
        max_positions=100,
        num_regions=4,
        floor_hot_blocks=2,
        start_hot_blocks=3,
        max_hot_blocks=4,
        tail_pages=2,
        admission_pages=10,
    )


@dataclass
class _Region:
    name: str
    view: torch.Tensor  # uint8 [blocks, bytes of a block], strided
    group: int


@dataclass
class Producer:
    """What a consumer can reach."""

    peer: Peer
    regions: list[_Region]
    agent: Any
    marks: Marks | None  # with HiSparse: of "there", the request that `test_reader.py` reads
    kept: list[Any] = field(default_factory=list)  # memory and registrations

    def rows(self, name: str, block: int, at: int = 0, num_bytes: int | None = None) -> torch.Tensor:
        """Bytes of a layer's block; `at` and `num_bytes`: where it lies if device blocks are one region."""
        whole = [r.view for r in self.regions if r.name == name]
        return whole[0][block] if whole else self.regions[0].view[block][at:][:num_bytes]

    def hear(self, count: int) -> list[str]:
        """The next `count` notifications, or fewer if they do not come in time."""
        found: list[str] = []
        deadline = time.monotonic() + 20
        while len(found) < count and time.monotonic() < deadline:
            found += [m.decode() for ms in self.agent.get_new_notifs().values() for m in ms]
        return found


def _plain_regions(layout: Layout) -> tuple[list[_Region], list[torch.Tensor], None]:
    """Keys in block list 0, rows in block list 1, one tensor each, with gaps between blocks."""
    regions, memory = [], []
    names = [(n, layout.geometry.shape.indexer_page_bytes, 0) for n in layout.indexer_layers]
    names += [(n, layout.page_bytes, 1) for n in layout.layers]
    for name, num_bytes, group in names:
        pool = torch.randint(0, 256, (NUM_BLOCKS, num_bytes + 32), dtype=torch.uint8)
        memory.append(pool)
        regions.append(_Region(name, pool[:, :num_bytes], group))
    return regions, memory, None


def _hisparse_regions(layout: Layout) -> tuple[list[_Region], list[torch.Tensor], Marks]:
    """As `lending.py` offers them: block lists of keys, parts and host pages."""
    memory = Memory(layout, torch.device("cpu"))
    memory.host_pool = memory.host_pool.clone()  # the process has one host pool of a size
    for pool in (memory.device_pool, memory.host_pool):
        pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8))
    blocks, stride = layout.num_device_blocks, layout.block_stride_bytes
    regions = [_Region(device_region(layout), memory.device_pool[: blocks * stride].view(blocks, stride), 0)]
    for group in range(len(layout.index_groups)):
        rows = memory.group_host_rows(group).view(layout.num_host_blocks, -1)
        regions.append(_Region(host_region(group), rows, 1 + layout.num_parts))
    marks = Marks(layout.num_host_blocks, layout.page_tokens)
    marks.update(["there"], [])
    table = marks.table.view(torch.uint8)
    regions.append(_Region(MARKS_REGION, table, 1 + layout.num_parts))
    return regions, [memory.device_pool, memory.host_pool, table], marks


@contextmanager
def producer(layout: Layout, hisparse: bool, compatibility: str = COMPATIBILITY) -> Iterator[Producer]:
    """A producer of `layout`'s pages, laid out as plain vLLM does it or as HiSparse does."""
    from nixl._api import nixl_agent, nixl_agent_config

    regions, memory, marks = (_hisparse_regions if hisparse else _plain_regions)(layout)
    agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(backends=["UCX"]))
    kept = [agent.register_memory(pool, backends=["UCX"]) for pool in memory]
    peer = Peer(f"engine-{uuid.uuid4()}", "127.0.0.1", free_port(), 1)
    metadata = NixlAgentMetadata(
        engine_id=peer.engine_id,
        agent_metadata=agent.get_agent_metadata(),
        kv_caches_base_addr=[r.view.data_ptr() for r in regions],
        device_id=0,
        num_blocks=NUM_BLOCKS,
        block_lens=[r.view.shape[1] for r in regions],
        block_strides=[r.view.stride(0) for r in regions],
        kv_cache_layout="BLHNC",
        block_size=layout.page_tokens,
        ssm_sizes=(0, 0),
        attn_backend_name="any",
        physical_blocks_per_logical_kv_block=1,
        region_num_blocks=[r.view.shape[0] for r in regions],
        region_group_ids=[r.group for r in regions],
        region_names=[r.name for r in regions],
        region_mem_types=["DRAM"] * len(regions),
    )
    payload = NixlHandshakePayload(compatibility, msgspec.msgpack.encode(metadata))
    ready, stop = threading.Event(), threading.Event()
    encoded = {(0, 0): msgspec.msgpack.encode(payload)}
    listener = threading.Thread(
        target=NixlBaseConnectorScheduler._nixl_handshake_listener,
        args=(encoded, ready, stop, peer.host, peer.port),
        daemon=True,  # it looks at `stop` once a second, which nobody waits for
    )
    listener.start()
    ready.wait()
    found = Producer(peer, regions, agent, marks, [memory, kept])
    try:
        yield found
    finally:
        stop.set()
        for descriptors in kept:
            agent.deregister_memory(descriptors, backends=["UCX"])


def block_lists(found: Producer, device: Sequence[int], host: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """A request's block lists, by page: `device` blocks for keys and rows, but where `host` has one."""
    num_groups = 1 + max(r.group for r in found.regions)
    if not any(r.name == host_region(0) for r in found.regions):
        return (tuple(device),) * num_groups
    rows = tuple(ABSENT if h != ABSENT else d for d, h in zip(device, host, strict=True))
    return tuple(device), *[rows] * (num_groups - 2), tuple(host)
