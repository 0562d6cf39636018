"""vLLM's NIXL handshake, from the reading side: what a producing engine tells about its memory.

The formats are vLLM's own (`nixl/metadata.py`): a producer may be vLLM's NixlConnector without HiSparse.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlHandshakePayload,
    compute_nixl_compatibility_hash,
)

from vllm_hisparse.planning.layout import Layout

from .messages import Peer

__all__ = [
    "DEVICE_REGION",
    "MARKS_REGION",
    "Region",
    "RemoteRank",
    "compatibility_hash",
    "device_region",
    "host_region",
    "shake_hands",
]

ANSWER_MS = 5000
# Regions of a producer with HiSparse: whole blocks of its device pool, host pages by index group, and marks.
DEVICE_REGION, HOST_REGION, MARKS_REGION = "hisparse_device.", "hisparse_host.", "hisparse_marks"


@dataclass(frozen=True)
class Region:
    """Equal blocks in a producer's memory; `group` says which of a request's block lists counts them."""

    base: int  # address
    block_bytes: int
    stride_bytes: int
    num_blocks: int
    group: int
    memory: str  # DRAM or VRAM


@dataclass(frozen=True)
class RemoteRank:
    """One rank of a producing engine."""

    agent: bytes  # NIXL's metadata
    device_id: int
    page_tokens: int
    regions: dict[str, Region]  # by layer name, or `device_region`, `host_region` and `MARKS_REGION`


def device_region(layout: Layout) -> str:
    """Name of the region of device blocks; the same for layouts that place everything in a block alike."""
    placed = (
        layout.layers,
        layout.layer_part,
        layout.layer_offset,
        layout.indexer_layers,
        layout.indexer_offset,
    )
    sizes = layout.page_tokens, layout.row_bytes, layout.block_stride_bytes, layout.indexer_pages
    return DEVICE_REGION + hashlib.sha256(repr((placed, sizes)).encode()).hexdigest()[:16]


def host_region(index_group: int) -> str:
    """Name of the region of an index group's host pages."""
    return f"{HOST_REGION}{index_group}"


def compatibility_hash(vllm_config: Any) -> str:
    """Of model, dtype, attention and vLLM's version: two engines with the same can read each other's KV."""
    backend = get_current_attn_backends(vllm_config)[0].get_name()
    return compute_nixl_compatibility_hash(vllm_config, backend)


def shake_hands(peer: Peer, rank: int, compatibility: str) -> RemoteRank:
    """Ask a producer's rank for its memory. Blocks for a round trip, at most `ANSWER_MS`.

    Raises zmq.ZMQError without an answer, RuntimeError if the producer is not the one expected or does not
    compute what this engine computes.
    """
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        host = f"[{peer.host}]" if ":" in peer.host else peer.host
        socket.connect(f"tcp://{host}:{peer.port}")
        socket.send(msgspec.msgpack.encode((GET_META_MSG, 0, rank)))
        answer = socket.recv_multipart()[0]
    payload = msgspec.msgpack.decode(answer, type=NixlHandshakePayload)
    if payload.compatibility_hash != compatibility:
        raise RuntimeError(
            f"got a producer at {peer.host}:{peer.port} with another vLLM version, model, dtype or attention "
            "backend; need equal ones on both sides because pages are taken as they are"
        )
    metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
    if metadata.engine_id != peer.engine_id:
        raise RuntimeError(
            f"got engine {metadata.engine_id} at {peer.host}:{peer.port}; need {peer.engine_id}, which has "
            "computed the prompt: it has been restarted since"
        )
    return _remote_rank(metadata)


def _remote_rank(metadata: NixlAgentMetadata) -> RemoteRank:
    names = metadata.region_names or []
    columns = (
        metadata.kv_caches_base_addr,
        metadata.block_lens,
        metadata.block_strides,
        metadata.region_num_blocks or [],
        metadata.region_group_ids or [],
        metadata.region_mem_types or [],
    )
    regions = {name: Region(*row) for name, *row in zip(names, *columns, strict=True)}
    return RemoteRank(metadata.agent_metadata, metadata.device_id, metadata.block_size, regions)
