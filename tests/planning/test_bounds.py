"""What requests need and how many fit, against values worked out by hand."""

from fractions import Fraction
from typing import Any

import pytest

from tests.planning.engines import PATTERNS, engine, layer_specs
from vllm_hisparse.config import GIB, MIB
from vllm_hisparse.planning.bounds import (
    RequestBlocks,
    active_tail_pages,
    admission_concurrency,
    request_blocks,
    result_bytes,
    state_bytes,
    steady_concurrency,
    table_bytes,
)
from vllm_hisparse.planning.groups import kv_cache_groups, make_plan
from vllm_hisparse.planning.layout import LayerPlan, layout_from
from vllm_hisparse.planning.pools import kv_cache_config
from vllm_hisparse.planning.report import ADVICE, startup_lines, steady_state


def plan_of(pattern: str) -> LayerPlan:
    specs = layer_specs(pattern)
    source = {name: spec for name, spec in specs.items() if "indexer" not in name}
    return make_plan(source, {name: spec for name, spec in specs.items() if name not in source}, 16)


def test_a_long_request_on_glm_52() -> None:
    """202,752 tokens, 8,192-token steps, two in flight: 3168 pages, of which the device needs 322 a part."""
    need = request_blocks(engine(max_model_len=202752), plan_of(PATTERNS["glm-5.2"]))
    assert need == RequestBlocks(
        num_pages=3168,
        num_parts=6,
        indexer_blocks=1056,  # 3168 / 3
        tail_pages=2,
        chunk_pages=256,  # 2 x 8192 / 64
        floor_hot_blocks=32,  # 2048 / 64
        start_hot_blocks=64,
        max_hot_blocks=128,
        max_pages=3168,
        # 21 groups: 2 bytes a position, 8 bytes a slot, a clock
        state_bytes=21 * (2 * 202752 + 8 * 8192 + 4),
    )
    assert need.admission_pages == 64 + 2 + 256
    assert need.admission_blocks == 1056 + 6 * 322 == 2988
    assert need.steady_blocks(64) == 1056 + 6 * 66 == 1452
    assert need.steady_blocks(32) == 1056 + 6 * 34 == 1260
    assert need.resident_blocks == 1056 + 6 * 3168 == 20064


def test_a_short_request_needs_no_hot_region() -> None:
    plan = plan_of(PATTERNS["glm-tiny"])
    need = request_blocks(engine(), plan, num_tokens=1000)
    assert (need.num_pages, need.indexer_blocks) == (16, 4)  # 15.6 pages, 3.1 blocks of 320 tokens
    assert need.admission_pages == 16
    assert need.steady_blocks(64) == need.resident_blocks == 20
    assert need.max_pages == 1024
    assert need.state_bytes == request_blocks(engine(), plan).state_bytes


def test_speculation_widens_floor_and_tail() -> None:
    need = request_blocks(engine(speculative_tokens=3), plan_of("FF"))
    assert (need.floor_hot_blocks, need.start_hot_blocks, need.max_hot_blocks) == (128, 160, 160)
    assert need.tail_pages == 2  # 4 rows, 2 steps


@pytest.mark.parametrize(("rows", "pages"), [(1, 2), (2, 2), (64, 2), (65, 3), (130, 4)])
def test_tail(rows: int, pages: int) -> None:
    assert active_tail_pages(rows, 64) == pages


def test_state_and_tables() -> None:
    assert state_bytes(3, 100, 10) == 3 * (2 * 100 + 8 * 10 + 4)
    need = request_blocks(engine(), plan_of(PATTERNS["glm-5.2"]))
    # 7 tables of 1024 pages for 64 requests, and 6 of 128 blocks for 10 regions
    assert table_bytes(need, num_regions=10, max_requests=64) == 4 * (7 * 64 * 1024 + 6 * 10 * 128)


def test_results() -> None:
    """Groups that straddle two parts have two planes of rows."""
    straddling = plan_of(PATTERNS["glm-5.2"])
    assert result_bytes(straddling, 2048, 8192, 64, 2048) == 4 * (2 * 8192 * 2048 + 2 * 64 * 2048)
    assert result_bytes(plan_of("FF"), 2048, 100, 3, 50) == 4 * (100 * 2048 + 2 * 3 * 50)


def test_regions() -> None:
    """A region takes 34 blocks of the pool; state takes 1/16 of it, or 64 MiB where that is more."""
    need = request_blocks(engine(), plan_of(PATTERNS["glm-tiny"]))
    state = 8 * (2 * 65536 + 8 * 8192 + 4)
    assert need.state_bytes == state
    assert need.num_regions(341, 341120, 64) == 10  # 340 blocks
    assert need.num_regions(340, 341120, 64) == 9
    assert need.num_regions(20, 341120, 64) == 1  # never none
    assert need.num_regions(100_000, 341120, 2000) == 100_000 * 341120 // 16 // state == 1355
    assert need.num_regions(100_000, 341120, 64) == 64
    assert need.num_regions(2000, 341120, 1000) == 64 * MIB // state == 42  # 58 would fit the pool


def tiny_need(**changes: Any) -> RequestBlocks:
    values = {
        "num_pages": 100,
        "num_parts": 2,
        "indexer_blocks": 20,
        "tail_pages": 2,
        "chunk_pages": 10,
        "floor_hot_blocks": 4,
        "start_hot_blocks": 8,
        "max_hot_blocks": 16,
        "max_pages": 100,
        "state_bytes": 1000,
    }
    return RequestBlocks(**(values | changes))


def test_admission_by_hand() -> None:
    """20 + 2 x (8 + 2 + 10) = 60 device blocks and 100 host blocks a request; a null block in each pool."""
    bound = admission_concurrency(tiny_need(), 601, 901, max_requests=8)
    assert (bound.device, bound.host) == (10, 9)
    assert (bound.value, bound.limit) == (8, "max_num_seqs")
    bound = admission_concurrency(tiny_need(), 601, 951, max_requests=20)
    assert (bound.value, bound.limit) == (Fraction(19, 2), "host")
    bound = admission_concurrency(tiny_need(), 601, 5001, max_requests=20)
    assert (bound.value, bound.limit) == (10, "device")


def test_steady_state_by_hand() -> None:
    """One request being admitted (60 blocks), the others 20 + 2 x (8 + 2) = 40, or 32 at the floor."""
    need = tiny_need()
    bound = steady_concurrency(need, 1 + 60 + 400, 10_001, num_regions=64, max_requests=64, hot_blocks=8)
    assert (bound.device, bound.limit) == (11, "device")
    assert steady_concurrency(need, 1 + 60 + 400, 10_001, 64, 64, 4).device == Fraction(27, 2)
    assert steady_concurrency(need, 1 + 30, 10_001, 64, 64, 8).device == Fraction(1, 2)  # not even one
    assert steady_concurrency(need, 461, 501, 64, 64, 8).limit == "host"
    assert steady_concurrency(need, 461, 501, 3, 64, 8).limit == "regions"
    assert steady_concurrency(need, 461, 10_001, 64, 7, 8).limit == "max_num_seqs"


def test_requests_that_stay_resident_need_no_region() -> None:
    need = tiny_need(num_pages=10, indexer_blocks=2)
    assert steady_concurrency(need, 1001, 10_001, 3, 64, 8).num_regions == 64
    assert steady_concurrency(need, 1001, 10_001, 3, 64, 7).num_regions == 3


def test_the_report() -> None:
    """Sixteen requests of 65,024 tokens in 0.8 GiB: the in-tree plan fits 3.96 of them (measured)."""
    vllm_config = engine(max_model_len=65536, max_num_seqs=16, prefill_staging_mib=16, host_pool_gib=16)
    groups = kv_cache_groups(vllm_config, layer_specs(PATTERNS["glm-tiny"]))
    assert groups is not None
    config = kv_cache_config(vllm_config, groups, int(0.8 * GIB), 16 * GIB)
    layout = layout_from(vllm_config, config)
    steady = steady_state(vllm_config, layout)
    need = request_blocks(vllm_config, layout)
    assert need.steady_blocks(layout.start_hot_blocks) == 205 + 66
    assert steady.device == 1 + Fraction(config.num_blocks - 1 - (205 + 322), 271)
    assert 7 < steady.value < 8
    lines = startup_lines(vllm_config, layout)
    assert len(lines) == 8
    text = "\n".join(lines)
    for part in (
        f"device pool: {config.num_blocks} blocks of 341120 bytes",
        "an indexer block holds 5 x 64 tokens of 8 layers",
        "host pool: 51150 blocks of 335872 bytes, 16.00 GiB; 8 index groups",
        "padding: 1.4% of a resident request's blocks, 1.1% of a host-backed one's (65280 tokens, ",
        "16 hot regions of 2048 to 8192 rows, 4096 when granted; 1 x top-k 2048 a step, policy lrfu",
        f"{float(steady.value):.2f} decoding (271 each)",
        "decoding is limited by device: raise gpu_memory_utilization or lower max_model_len (device 7.16, ",
        "admission is limited by device: raise gpu_memory_utilization, or lower max_num_batched_tokens (",
        "indexer keys take 205 of the 271 device blocks that decoding needs, ",
    ):
        assert part in text, part
    transfer = vllm_config.kv_transfer_config
    options = {
        "connectors": [{"kv_connector": c, "kv_role": "kv_both"} for c in ("HiSparseConnector", "Other")]
    }
    options["connectors"][0]["kv_connector_extra_config"] = transfer.kv_connector_extra_config
    transfer.kv_connector, transfer.kv_connector_extra_config = "MultiConnector", options
    assert startup_lines(vllm_config, layout) == lines[:-1]
    assert {"device", "host", "regions", "max_num_seqs"} == set(ADVICE)
