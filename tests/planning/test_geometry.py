"""Block geometry: the padding bar on real shapes, and what holds for any shape."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.planning.engines import KEY_BYTES, PATTERNS, ROW_BYTES, shape_of
from vllm_hisparse.planning.geometry import (
    PADDING_BAR,
    ROW_ALIGNMENT,
    Geometry,
    Shape,
    choose_geometry,
    make_geometry,
    request_padding,
)

# (indexer pages, parts, block stride in bytes)
CHOSEN = {
    ("glm-5.2", "fp8"): (3, 6, 547104),  # 13 layers x 41984 = 545792, rounded up to 48 x 41 = 1968 bytes
    ("glm-5.2", "bf16"): (2, 16, 368640),  # 5 layers x 73728
    ("deepseek-v3.2", "fp8"): (5, 1, 2581360),  # 5 x 61 x 8448 = 2576640, and room for 61 equal shares
    ("deepseek-v3.2", "bf16"): (1, 9, 516096),  # 7 layers x 73728
    ("glm-tiny", "fp8"): (5, 1, 341120),  # 5 x 8 x 8448 = 337920, rounded up to 3280 bytes
    ("glm-tiny", "bf16"): (9, 1, 608256),  # 9 x 8 x 8448
    ("glm-shared", "fp8"): (5, 4, 85280),  # 5 x 2 x 8448 = 84480
    ("glm-shared", "bf16"): (9, 4, 152064),  # 9 x 2 x 8448
}


@pytest.mark.parametrize("model", PATTERNS)
@pytest.mark.parametrize("dtype", ROW_BYTES)
def test_real_shapes_stay_within_the_bar(model: str, dtype: str) -> None:
    geometry = choose_geometry(shape_of(PATTERNS[model], ROW_BYTES[dtype]), max_indexer_pages=16)
    assert (geometry.indexer_pages, geometry.num_parts, geometry.block_stride_bytes) == CHOSEN[model, dtype]
    assert 0 <= geometry.resident_padding <= PADDING_BAR
    assert 0 <= geometry.indexer_padding <= PADDING_BAR
    padding = request_padding(geometry, num_tokens=100_000, hot_blocks=64)
    assert 0 <= padding.resident <= PADDING_BAR
    assert 0 <= padding.backed <= PADDING_BAR


def test_one_indexer_page_where_the_bar_cannot_be_met() -> None:
    """Beside connectors that move kernel blocks: the least that one page a block allows, a twelfth here."""
    geometry = choose_geometry(shape_of(PATTERNS["glm-5.2"], 656), max_indexer_pages=1)
    assert (geometry.indexer_pages, geometry.num_parts, geometry.block_stride_bytes) == (1, 20, 177776)
    padding = request_padding(geometry, num_tokens=65536, hot_blocks=64)
    assert PADDING_BAR < padding.resident < 0.08
    assert padding.backed < PADDING_BAR


def test_padding_by_hand() -> None:
    """2 layers of 64-byte rows, 1 of 16-byte indexer keys, 4 tokens a page, 3 pages an indexer block."""
    shape = Shape(num_layers=2, num_indexer_layers=1, row_bytes=64, indexer_row_bytes=16, page_tokens=4)
    geometry = make_geometry(shape, num_parts=1, indexer_pages=3)
    assert geometry.block_stride_bytes == 576  # 2 x 256, rounded up to lcm(64, 3 x 16)
    assert geometry.block_stride_rows == 9
    assert geometry.indexer_stride_bytes == 192
    assert geometry.resident_padding == pytest.approx(64 / 576)
    assert geometry.indexer_padding == pytest.approx(384 / 576)
    assert geometry.indexer_share_bytes == 448  # two strides and a page
    padding = request_padding(geometry, num_tokens=30, hot_blocks=5)  # 2 whole indexer blocks: 6 pages
    assert padding.num_tokens == 24
    assert padding.num_hot_rows == 20
    assert (padding.resident_held_bytes, padding.resident_used_bytes) == (8 * 576, 6 * 512 + 6 * 64)
    assert (padding.backed_held_bytes, padding.backed_used_bytes) == (7 * 576, 5 * 512 + 6 * 64)
    assert str(padding) == (
        "padding: 25.0% of a resident request's blocks, 27.0% of a host-backed one's (24 tokens, 20 hot rows)"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, r"got Shape\(.*; need sizes above 0 because"),
        (
            {"row_bytes": 650},
            "got a row of 650 bytes; need a multiple of 16 because kernels move 16-byte words",
        ),
        (
            {"indexer_row_bytes": 131, "page_tokens": 8},
            "got an indexer page of 1048 bytes; need a multiple of 16",
        ),
    ],
)
def test_bad_shapes(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Shape(8, 8, 656, 132, 64), **changes)


shapes = st.builds(
    Shape,
    num_layers=st.integers(1, 96),
    num_indexer_layers=st.integers(1, 96),
    row_bytes=st.sampled_from([576, 656, 1024, 1152, 16, 4096]),
    indexer_row_bytes=st.sampled_from([KEY_BYTES, 68, 256]),
    page_tokens=st.sampled_from([64, 128]),
)


def check(geometry: Geometry) -> None:
    """What the pool's users rely on."""
    shape, stride, pages = geometry.shape, geometry.block_stride_bytes, geometry.indexer_pages
    assert stride % shape.row_bytes == 0
    assert stride % pages == 0
    assert geometry.indexer_stride_bytes % ROW_ALIGNMENT == 0
    assert sum(geometry.part_layers) == shape.num_layers
    assert max(geometry.part_layers) - min(geometry.part_layers) <= 1
    assert all(layers * shape.page_bytes <= stride for layers in geometry.part_layers)
    assert shape.num_indexer_layers * shape.indexer_page_bytes <= geometry.indexer_stride_bytes
    share = geometry.indexer_share_bytes
    assert share % ROW_ALIGNMENT == 0
    assert shape.num_indexer_layers * share <= stride
    end_of_keys = (
        pages - 1
    ) * geometry.indexer_stride_bytes + shape.num_indexer_layers * shape.indexer_page_bytes
    assert shape.num_indexer_layers * share >= end_of_keys


@given(shapes, st.integers(1, 96), st.integers(1, 16))
def test_any_geometry_is_sound(shape: Shape, num_parts: int, indexer_pages: int) -> None:
    assume(num_parts <= shape.num_layers)
    geometry = make_geometry(shape, num_parts, indexer_pages)
    check(geometry)
    slack = (
        math.lcm(shape.row_bytes, ROW_ALIGNMENT * indexer_pages) + ROW_ALIGNMENT * shape.num_indexer_layers
    )
    widest = max(
        geometry.part_layers[0] * shape.page_bytes,
        indexer_pages * shape.num_indexer_layers * shape.indexer_page_bytes,
    )
    assert geometry.block_stride_bytes < widest + indexer_pages * slack


@settings(max_examples=30)
@given(shapes, st.integers(1, 8))
def test_the_choice_is_sound_and_minimal(shape: Shape, max_indexer_pages: int) -> None:
    chosen = choose_geometry(shape, max_indexer_pages)
    assert chosen == choose_geometry(shape, max_indexer_pages)
    check(chosen)
    assert chosen.indexer_pages <= max_indexer_pages

    def within(geometry: Geometry) -> bool:
        return max(geometry.resident_padding, geometry.indexer_padding) <= PADDING_BAR

    for pages in range(1, max_indexer_pages + 1):
        for parts in range(1, shape.num_layers + 1):
            if (pages, parts) < (chosen.indexer_pages, chosen.num_parts) or not within(chosen):
                assert not within(make_geometry(shape, parts, pages)), (pages, parts)
