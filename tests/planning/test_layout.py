"""The layout's bytes: every row and key has a place of its own, in both pools."""

import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.engines import PATTERNS, shape_of
from vllm_hisparse.planning.geometry import ROW_ALIGNMENT, choose_geometry, make_geometry
from vllm_hisparse.planning.layout import LayerPlan, Layout


def make_layout(pattern: str, row_bytes: int, num_parts: int, pages: int, host_blocks: int = 5) -> Layout:
    shape = shape_of(pattern, row_bytes)
    geometry = make_geometry(shape, num_parts, pages) if num_parts else choose_geometry(shape, pages)
    groups: list[list[str]] = []
    for layer, letter in enumerate(pattern):
        if letter == "F":
            groups.append([])
        groups[-1].append(f"l{layer}")
    return Layout(
        geometry=geometry,
        layers=tuple(f"l{layer}" for layer in range(len(pattern))),
        index_groups=tuple(map(tuple, groups)),
        indexer_layers=tuple(f"i{layer}" for layer, letter in enumerate(pattern) if letter == "F"),
        num_device_blocks=7,
        num_host_blocks=host_blocks,
        max_requests=4,
        max_positions=1000,
        num_regions=2,
        floor_hot_blocks=1,
        start_hot_blocks=2,
        max_hot_blocks=3,
        tail_pages=2,
        admission_pages=9,
    )


layouts = st.builds(
    lambda tail, row, parts, pages: make_layout("F" + tail, row, min(parts, len(tail) + 1), pages),
    st.text("FS", max_size=30),
    st.sampled_from([656, 1152, 576, 16]),
    st.integers(1, 31),
    st.integers(1, 9),
)


def intervals_are_disjoint(intervals: list[tuple[int, int]]) -> bool:
    intervals = sorted(intervals)
    return all(end <= start for (_, end), (start, _) in pairwise(intervals))


@given(layouts)
def test_device_blocks(layout: Layout) -> None:
    """Pages of a part's layers, and keys of all pages of an indexer block, lie apart inside the block."""
    stride, page = layout.block_stride_bytes, layout.page_bytes
    assert layout.layers == tuple(name for names in layout.parts for name in names)
    for part, names in enumerate(layout.parts):
        places = [layout.layer_offset[layout.layer_index[name]] for name in names]
        assert all(layout.layer_part[layout.layer_index[name]] == part for name in names)
        assert intervals_are_disjoint([(offset, offset + page) for offset in places])
        assert all(offset % ROW_ALIGNMENT == 0 and 0 <= offset <= stride - page for offset in places)
    key_page = layout.geometry.shape.indexer_page_bytes
    keys = [
        offset + j * layout.indexer_stride_bytes
        for offset in layout.indexer_offset
        for j in range(layout.indexer_pages)
    ]
    assert intervals_are_disjoint([(start, start + key_page) for start in keys])
    assert all(start % ROW_ALIGNMENT == 0 and start + key_page <= stride for start in keys)
    shares = [(start, start + layout.indexer_share_bytes) for start in layout.indexer_share_offset]
    assert intervals_are_disjoint(shares)
    assert all(start % ROW_ALIGNMENT == 0 and end <= stride for start, end in shares)
    assert all(any(s <= start < e for s, e in shares) for start in keys), "keys outside every share"
    assert max(start + key_page for start in keys) <= max(end for _, end in shares)


@given(layouts)
def test_views_of_whole_pages_reach_the_last_block(layout: Layout) -> None:
    """A layer's contiguous view [n, page_tokens, row] from its offset holds the last block's page."""
    end = layout.device_pool_bytes + layout.device_slack_bytes
    for offset in layout.layer_offset:
        rows = (end - offset) // layout.page_bytes * layout.page_tokens
        assert (layout.num_device_blocks - 1) * layout.block_stride_rows + layout.page_tokens <= rows


@given(layouts)
def test_host_pool(layout: Layout) -> None:
    """Rows of an index group lie side by side; groups one after the other; the pool is exactly filled."""
    rows, row = layout.num_host_rows, layout.row_bytes
    assert layout.host_block_bytes == len(layout.layers) * layout.page_bytes
    assert layout.host_pool_bytes == rows * row * len(layout.layers)
    places = []
    for group, names in enumerate(layout.index_groups):
        start, width = layout.group_host_offset[group], layout.group_row_bytes[group]
        assert width == len(names) * row
        places.append((start, start + rows * width))
        for position, name in enumerate(names):
            index = layout.layer_index[name]
            assert layout.layer_group[index] == group
            assert layout.host_offset[index] == start + position * row
            assert layout.host_row_stride[index] == width
            last = layout.host_offset[index] + (rows - 1) * width + row
            assert last <= start + rows * width
    assert intervals_are_disjoint(places)
    assert places[0][0] == 0
    assert places[-1][1] == layout.host_pool_bytes


@given(layouts)
def test_index_groups_lie_in_neighbouring_parts(layout: Layout) -> None:
    for names, parts in zip(layout.index_groups, layout.group_parts, strict=True):
        assert {layout.layer_part[layout.layer_index[name]] for name in names} == set(parts)
        assert list(parts) == list(range(parts[0], parts[-1] + 1))


def test_glm_52() -> None:
    layout = make_layout(PATTERNS["glm-5.2"], 656, num_parts=0, pages=16, host_blocks=126_000)
    assert [len(names) for names in layout.parts] == [13] * 6
    assert [len(names) for names in layout.index_groups] == [1, 1] + [4] * 19
    assert sum(len(parts) == 2 for parts in layout.group_parts) == 4  # those that straddle two parts
    assert max(len(parts) for parts in layout.group_parts) == 2
    assert layout.host_pool_bytes == 126_000 * 64 * 656 * 78 > 2**31  # 64-bit offsets
    assert layout.host_offset[77] == 126_000 * 64 * 656 * 74 + 3 * 656
    assert layout.host_row_stride[77] == 2624
    assert layout.max_pages == 16
    assert layout.max_hot_rows == 192


def test_a_layout_is_plain_data() -> None:
    layout = make_layout("FSF", 656, num_parts=2, pages=3)
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert hash(layout) == hash(pickle.loads(pickle.dumps(layout)))
    plan = LayerPlan(layout.geometry, layout.layers, layout.index_groups, layout.indexer_layers)
    assert plan.layer_offset == layout.layer_offset
    with pytest.raises(AttributeError):
        plan.layers = ()  # type: ignore[misc]
