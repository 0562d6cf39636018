"""Shape of a device block: how many parts a page is split into and how many pages an indexer block holds.

vLLM has one device pool with one block stride. A block of it is, at any time, one of
  * a resident block: one page (`page_tokens` rows) of each layer of one part, layers side by side;
  * a hot block: the same shape, `page_tokens` slots of a hot region;
  * an indexer block: `indexer_pages` pages of every indexer layer, page-major ([pages][layers][page_tokens
    keys]), so that pages lie at one stride, `block_stride / indexer_pages`, across the whole pool.
The stride is the widest of them; what the others leave empty is padding. Pure integers, no torch, no vLLM.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from vllm_hisparse.config import user_error

ROW_ALIGNMENT = 16  # bytes: 128-bit loads, and TMA's rule for strides and base addresses
PADDING_BAR = 0.05
TYPICAL_PAGES = (1024, 64)  # a request of 64K tokens with 4096 hot rows, at 64 tokens a page


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


@dataclass(frozen=True)
class Shape:
    """What a model asks for: `row_bytes` of KV a token and layer, `indexer_row_bytes` of indexer key."""

    num_layers: int
    num_indexer_layers: int
    row_bytes: int
    indexer_row_bytes: int
    page_tokens: int

    def __post_init__(self) -> None:
        if min(astuple(self)) < 1:
            raise user_error(got=f"{self}", need="sizes above 0", because="a block holds rows of each kind")
        for what, size in (("a row", self.row_bytes), ("an indexer page", self.indexer_page_bytes)):
            if size % ROW_ALIGNMENT:
                raise user_error(
                    got=f"{what} of {size} bytes",
                    need=f"a multiple of {ROW_ALIGNMENT}",
                    because="kernels move 16-byte words",
                )

    @property
    def page_bytes(self) -> int:
        """One page of one layer."""
        return self.page_tokens * self.row_bytes

    @property
    def indexer_page_bytes(self) -> int:
        """One page of one indexer layer."""
        return self.page_tokens * self.indexer_row_bytes


@dataclass(frozen=True)
class Geometry:
    """A block's shape. `part_layers[p]` consecutive layers lie in part p."""

    shape: Shape
    block_stride_bytes: int
    part_layers: tuple[int, ...]
    indexer_pages: int

    @property
    def num_parts(self) -> int:
        return len(self.part_layers)

    @property
    def block_stride_rows(self) -> int:
        return self.block_stride_bytes // self.shape.row_bytes

    @property
    def indexer_stride_bytes(self) -> int:
        """Distance of consecutive indexer pages of a layer, over block borders too."""
        return self.block_stride_bytes // self.indexer_pages

    @property
    def indexer_block_tokens(self) -> int:
        return self.indexer_pages * self.shape.page_tokens

    @property
    def indexer_share_bytes(self) -> int:
        """Bytes of an indexer block that each indexer layer stands for when the block is saved as a whole.

        A page in blocks of one page. In larger blocks a layer's pages lie apart; then the layers' shares,
        one after the other from the block's start, together cover every page of every layer.
        """
        shape = self.shape
        if self.indexer_pages == 1:
            return shape.indexer_page_bytes
        keys_of_a_page = shape.num_indexer_layers * shape.indexer_page_bytes
        end_of_keys = (self.indexer_pages - 1) * self.indexer_stride_bytes + keys_of_a_page
        return round_up(ceil_div(end_of_keys, shape.num_indexer_layers), ROW_ALIGNMENT)

    @property
    def resident_padding(self) -> float:
        """Share of the bytes of a page's blocks that no row uses; the same for hot blocks."""
        return 1 - self.shape.num_layers * self.shape.page_bytes / (self.num_parts * self.block_stride_bytes)

    @property
    def indexer_padding(self) -> float:
        """Share of an indexer block's bytes that no key uses."""
        used = self.indexer_pages * self.shape.num_indexer_layers * self.shape.indexer_page_bytes
        return 1 - used / self.block_stride_bytes


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


def make_geometry(shape: Shape, num_parts: int, indexer_pages: int) -> Geometry:
    """The narrowest block for `num_parts` nearly equal parts and `indexer_pages` pages an indexer block.

    The stride is a multiple of the row (rows are addressed as block * stride_rows + offset) and of
    `indexer_pages * ROW_ALIGNMENT` (indexer pages start aligned), and holds the indexer layers' shares.
    """
    small, larger = divmod(shape.num_layers, num_parts)
    part_layers = tuple(small + (part < larger) for part in range(num_parts))
    keys = indexer_pages * shape.num_indexer_layers * shape.indexer_page_bytes
    unit = math.lcm(shape.row_bytes, indexer_pages * ROW_ALIGNMENT)
    stride = round_up(max(part_layers[0] * shape.page_bytes, keys), unit)
    geometry = Geometry(shape, stride, part_layers, indexer_pages)
    while shape.num_indexer_layers * geometry.indexer_share_bytes > geometry.block_stride_bytes:
        geometry = replace(geometry, block_stride_bytes=geometry.block_stride_bytes + unit)
    return geometry


@lru_cache(maxsize=64)
def choose_geometry(shape: Shape, max_indexer_pages: int, bar: float = PADDING_BAR) -> Geometry:
    """Fewest indexer pages, then fewest parts, with the padding of every kind of block within `bar`.

    Where there is none: the least padding of a typical request. Fewer indexer pages make finer prefix hits
    and waste less at a request's tail; fewer parts make fewer tables and longer runs of rows. Looks at every
    pair of the two: num_layers * max_indexer_pages of them.
    """
    candidates = [
        make_geometry(shape, num_parts, pages)
        for pages in range(1, max_indexer_pages + 1)
        for num_parts in range(1, shape.num_layers + 1)
    ]
    return min(candidates, key=lambda g: (_excess_padding(g, bar), g.indexer_pages, g.num_parts))


def _excess_padding(geometry: Geometry, bar: float) -> float:
    if max(geometry.resident_padding, geometry.indexer_padding) <= bar:
        return 0.0
    pages, hot_blocks = TYPICAL_PAGES
    padding = request_padding(geometry, pages * geometry.shape.page_tokens, hot_blocks)
    return max(padding.resident, padding.backed)
