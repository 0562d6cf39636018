"""What a block geometry wastes, for a request of a given length."""

from __future__ import annotations

from dataclasses import dataclass

from .geometry import Geometry


@dataclass(frozen=True)
class Padding:
    """Bytes of the blocks that a request holds, and bytes of them that hold rows and keys; no tail blocks.

    `resident`: all pages on the device. `backed`: indexer keys and a hot region on the device.
    """

    num_tokens: int
    num_hot_rows: int
    resident_held_bytes: int
    resident_used_bytes: int
    backed_held_bytes: int
    backed_used_bytes: int

    @property
    def resident(self) -> float:
        """Share of a resident request's bytes that is padding."""
        return 1 - self.resident_used_bytes / self.resident_held_bytes

    @property
    def backed(self) -> float:
        """Share of a host-backed request's bytes that is padding."""
        return 1 - self.backed_used_bytes / self.backed_held_bytes

    def __str__(self) -> str:
        return (
            f"padding: {self.resident:.1%} of a resident request's blocks, {self.backed:.1%} of a host-backed"
            f" one's ({self.num_tokens} tokens, {self.num_hot_rows} hot rows)"
        )


def request_padding(geometry: Geometry, num_tokens: int, hot_blocks: int) -> Padding:
    """Padding of a request of `num_tokens` tokens, whole indexer blocks counted, and `hot_blocks` a part."""
    shape, stride = geometry.shape, geometry.block_stride_bytes
    indexer_blocks = max(1, num_tokens // geometry.indexer_block_tokens)
    num_pages = indexer_blocks * geometry.indexer_pages
    keys = num_pages * shape.num_indexer_layers * shape.indexer_page_bytes
    rows_of_a_page = shape.num_layers * shape.page_bytes
    return Padding(
        num_tokens=num_pages * shape.page_tokens,
        num_hot_rows=hot_blocks * shape.page_tokens,
        resident_held_bytes=stride * (indexer_blocks + geometry.num_parts * num_pages),
        resident_used_bytes=keys + rows_of_a_page * num_pages,
        backed_held_bytes=stride * (indexer_blocks + geometry.num_parts * hot_blocks),
        backed_used_bytes=keys + rows_of_a_page * hot_blocks,
    )
