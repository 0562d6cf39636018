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
from dataclasses import dataclass

from vllm_hisparse.config import user_error

ROW_ALIGNMENT = 16  # bytes: 128-bit loads, and TMA's rule for strides and base addresses
DEFAULT_PADDING_BAR = 0.05


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
        if (
            min(
                self.num_layers,
                self.num_indexer_layers,
                self.row_bytes,
                self.indexer_row_bytes,
                self.page_tokens,
            )
            < 1
        ):
            raise ValueError(
                f"got {self}; need every count and size above 0 because a block holds rows of each kind"
            )
        for name, size in (("row", self.row_bytes), ("indexer page", self.indexer_page_bytes)):
            if size % ROW_ALIGNMENT:
                raise user_error(
                    got=f"a {name} of {size} bytes",
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
    def resident_padding(self) -> float:
        """Share of the bytes of a page's blocks that no row uses; the same for hot blocks."""
        return 1 - self.shape.num_layers * self.shape.page_bytes / (self.num_parts * self.block_stride_bytes)

    @property
    def indexer_padding(self) -> float:
        """Share of an indexer block's bytes that no key uses."""
        used = self.indexer_pages * self.shape.num_indexer_layers * self.shape.indexer_page_bytes
        return 1 - used / self.block_stride_bytes

    @property
    def worst_padding(self) -> float:
        return max(self.resident_padding, self.indexer_padding)


def make_geometry(shape: Shape, num_parts: int, indexer_pages: int) -> Geometry:
    """The narrowest block for `num_parts` nearly equal parts and `indexer_pages` pages an indexer block.

    The stride is a multiple of the row (rows are addressed as block * stride_rows + offset) and of
    `indexer_pages * ROW_ALIGNMENT` (indexer pages start aligned).
    """
    small, larger = divmod(shape.num_layers, num_parts)
    part_layers = tuple(small + (part < larger) for part in range(num_parts))
    widest = max(
        part_layers[0] * shape.page_bytes, indexer_pages * shape.num_indexer_layers * shape.indexer_page_bytes
    )
    stride = round_up(widest, math.lcm(shape.row_bytes, indexer_pages * ROW_ALIGNMENT))
    return Geometry(shape, stride, part_layers, indexer_pages)


def choose_geometry(
    shape: Shape, max_indexer_pages: int, padding_bar: float = DEFAULT_PADDING_BAR
) -> Geometry:
    """Fewest indexer pages, then fewest parts, with all blocks within `padding_bar`; else least padding.

    Fewer indexer pages: finer prefix hits and less waste at a request's tail. Fewer parts: fewer tables and
    longer runs of rows. Looks at every pair of the two: num_layers * max_indexer_pages of them.
    """
    candidates = [
        make_geometry(shape, num_parts, pages)
        for pages in range(1, max_indexer_pages + 1)
        for num_parts in range(1, shape.num_layers + 1)
    ]
    return min(
        candidates,
        key=lambda g: (
            g.worst_padding > padding_bar,
            0 if g.worst_padding <= padding_bar else g.worst_padding,
            g.indexer_pages,
            g.num_parts,
        ),
    )
