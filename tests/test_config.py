"""Options and the checks of the engine: what is read, and the wording of every error."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.planning.engines import connector, engine, multi
from vllm_hisparse.config import DEFAULT_POLICY, MAX_HOT_ROWS, HiSparseConfig
from vllm_hisparse.engine_checks import validate_engine

OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
NIXL = {"kv_connector": "HiSparseNixlConnector", "kv_role": "kv_consumer"}


def read(**changes: Any) -> HiSparseConfig:
    return HiSparseConfig.from_vllm_config(engine(**changes))


def test_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, vllm_hisparse.config, vllm_hisparse.planning.geometry as g\n"
    code += "assert not {'torch', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_defaults() -> None:
    config = read(host_pool_gib=384)
    assert config == HiSparseConfig(
        host_pool_gib=384.0,
        top_k=2048,
        verify_rows=1,
        start_hot_rows=4096,
        max_hot_rows=8192,
        low_watermark=0.08,
        high_watermark=0.20,
        prefix_share=0.5,
        max_passing=16,
        policy=DEFAULT_POLICY,
        prefetch=True,
        skip_io=False,
        prefill_staging_mib=256,
        max_indexer_pages=16,
        eager_host_mirror=True,
        always_host=False,
        trace_path=None,
        trace_max_mib=256,
    )
    assert config.host_pool_bytes == 384 << 30
    assert config.floor_hot_rows == 2048
    assert config.prefill_staging_bytes == 256 << 20
    assert (config.low_blocks(1000), config.high_blocks(1000)) == (80, 200)


def test_every_option_is_read() -> None:
    options: dict[str, Any] = {
        "host_pool_gib": 2,
        "low_watermark": 0,
        "high_watermark": 1,
        "prefix_share": 0.25,
        "max_passing": 3,
        "policy": "lru",
        "prefetch": False,
        "skip_io": True,
        "prefill_staging_mib": 7,
        "max_indexer_pages": 3,
        "always_host": True,
        "trace_path": "selections.npz",
        "trace_max_mib": 5,
    }
    config = read(**options)
    assert {key: getattr(config, key) for key in options} == options
    assert read(eager_host_mirror=False).eager_host_mirror is False


@pytest.mark.parametrize(
    ("size", "cap", "speculative", "want"),
    [
        (None, None, None, (4096, 8192)),
        (None, None, 3, (10240, 10240)),  # floor 8192 plus one top-k, above 4 x top-k
        (None, None, 14, (32768, 32768)),  # floor 30720: no room for more
        (3000, None, None, (3000, 3000)),  # vLLM's size alone: it does not grow
        (3000, 5000, None, (3000, 5000)),
        (None, 3000, None, (3000, 3000)),  # a cap below the default start
        (None, 20000, None, (4096, 20000)),
        (2048, 2048, None, (2048, 2048)),
    ],
)
def test_hot_rows(size: int | None, cap: int | None, speculative: int | None, want: tuple[int, int]) -> None:
    options = {} if cap is None else {"max_hot_rows": cap}
    config = read(device_buffer_size=size, speculative_tokens=speculative, **options)
    assert (config.start_hot_rows, config.max_hot_rows) == want
    assert config.floor_hot_rows <= config.start_hot_rows <= config.max_hot_rows <= MAX_HOT_ROWS


@pytest.mark.parametrize(
    "entry",
    [
        connector(low_watermark=0.1),
        multi(connector(low_watermark=0.1)),
        multi(multi(connector(low_watermark=0.1), NIXL), OFFLOADING),
    ],
)
def test_connector_is_found_at_any_depth(entry: dict[str, Any]) -> None:
    assert HiSparseConfig.from_vllm_config(engine(entry)).low_watermark == 0.1
    assert validate_engine(engine(entry)).low_watermark == 0.1


@pytest.mark.parametrize("others", [(), (OFFLOADING,), (NIXL,), (OFFLOADING, NIXL)])
def test_nixl_keeps_indexer_blocks_to_one_page(others: tuple[dict[str, Any], ...]) -> None:
    pages = HiSparseConfig.from_vllm_config(engine(multi(connector(), *others))).max_indexer_pages
    assert pages == (1 if NIXL in others else 16)


@pytest.mark.parametrize("entry", [multi(OFFLOADING, connector()), multi(multi(NIXL), multi(connector()))])
def test_another_connector_before_ours_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"got .* before HiSparseConnector in MultiConnector; need Hi"):
        HiSparseConfig.from_vllm_config(engine(entry))


BAD_OPTIONS = [
    (
        {"host_pool_gb": 1},
        "got unknown options ['host_pool_gb'] for HiSparseConnector; need keys among ['always_host', "
        "'high_watermark', 'host_pool_gib', 'low_watermark', 'max_hot_rows', 'max_indexer_pages', "
        "'max_passing', 'policy', 'prefetch', 'prefill_staging_mib', 'prefix_share', 'skip_io', "
        "'trace_max_mib', 'trace_path'] because a misspelt option would be ignored silently",
    ),
    ({"fault": "nocopy"}, "got unknown options ['fault']"),
    ({"host_pool_gib": None}, "got no host_pool_gib for HiSparseConnector; need its size"),
    ({"host_pool_gib": 0}, "got host_pool_gib=0; need a finite size above 0 GiB because the full KV"),
    ({"host_pool_gib": float("inf")}, "got host_pool_gib=inf; need a finite size"),
    ({"host_pool_gib": float("nan")}, "got host_pool_gib=nan; need a finite size"),
    ({"host_pool_gib": "384"}, "got host_pool_gib='384' of type str; need float because"),
    ({"host_pool_gib": True}, "got host_pool_gib=True of type bool; need float because"),
    ({"prefix_share": 1}, "got prefix_share=1; need 0 <= prefix_share < 1 because"),
    ({"max_passing": -1}, "got max_passing=-1; need 0 or more because it is a number of requests"),
    (
        {"host_pool_gib": 1025, "prefetch": False},
        "got prefetch=false with host_pool_gib=1025; need at most 1024 GiB because single layers' rows",
    ),
    ({"skip_io": 1}, "got skip_io=1 of type int; need bool because"),
    ({"max_hot_rows": 4096.0}, "got max_hot_rows=4096.0 of type float; need int because"),
    (
        {"low_watermark": 0.3},
        "got low_watermark=0.3, high_watermark=0.2; need 0 <= low < high <= 1 because",
    ),
    ({"low_watermark": 0.2}, "got low_watermark=0.2, high_watermark=0.2; need 0 <= low < high <= 1"),
    ({"low_watermark": -0.1}, "got low_watermark=-0.1, high_watermark=0.2; need 0 <= low"),
    ({"high_watermark": 1.1}, "got low_watermark=0.08, high_watermark=1.1; need 0 <= low"),
    ({"policy": "fifo"}, "got policy='fifo'; need one of ['lru', 'lrfu'] because no other is built in"),
    ({"prefill_staging_mib": 0}, "got prefill_staging_mib=0; need at least 1 because"),
    ({"trace_max_mib": 0}, "got trace_max_mib=0; need at least 1 because"),
    ({"trace_path": True}, "got trace_path=True of type bool; need str because"),
    ({"max_indexer_pages": 0}, "got max_indexer_pages=0; need at least 1 because"),
    (
        {"max_hot_rows": 2047},
        "got max_hot_rows=2047; need 2048 to 32768 because a step may select 1 x top-k 2048",
    ),
    ({"max_hot_rows": 32769}, "got max_hot_rows=32769; need 2048 to 32768 because"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 the message is compared below
        read(**options)
    assert str(error.value).startswith(message)


BAD_ENGINES: list[tuple[dict[str, Any], str]] = [
    (
        {"device_buffer_size": 6143, "speculative_tokens": 2},
        "got device_buffer_size=6143; need 6144 to 32768 because a step may select 3 x top-k 2048 rows",
    ),
    (
        {"device_buffer_size": 8192, "max_hot_rows": 4096},
        "got max_hot_rows=4096 with device_buffer_size=8192; need max_hot_rows >= device_buffer_size because",
    ),
    (
        {"speculative_tokens": 16},
        "got 16 speculative tokens with top-k 2048; need at most 15 because a step's selections",
    ),
    (
        {"top_k": None},
        "got a glm_moe_dsa model without index_topk; need a DSA model (top-k sparse attention) because",
    ),
    (
        {"entry": NIXL | {"kv_connector_extra_config": {}}},
        "got 0 HiSparseConnector entries in --kv-transfer-config; need exactly one, on its own or inside",
    ),
    ({"entry": multi(connector(), connector())}, "got 2 HiSparseConnector entries"),
    (
        {"entry": multi(connector(max_indexer_pages=3), NIXL)},
        "got max_indexer_pages=3 with HiSparseNixlConnector; need 1 because that connector",
    ),
    (
        {"entry": multi(connector(), {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"})},
        "got NixlConnector beside HiSparseConnector; need HiSparseNixlConnector because with HiSparse",
    ),
    (
        {"entry": multi(connector(), NIXL | {"kv_role": "kv_both"})},
        "got kv_role='kv_both' for HiSparseNixlConnector; need 'kv_producer' or 'kv_consumer' because",
    ),
    (
        {"entry": multi(connector(), NIXL | {"kv_buffer_device": "cpu"})},
        "got kv_buffer_device='cpu' for HiSparseNixlConnector; need 'cuda' because",
    ),
    (
        {"entry": multi(connector(), NIXL | {"kv_connector_extra_config": {"backends": ["UCX"]}})},
        "got unknown options ['backends'] for HiSparseNixlConnector; need keys among ['import_timeout_s', "
        "'kv_lease_duration'] because",
    ),
    (
        {"entry": multi(connector(), NIXL | {"kv_connector_extra_config": {"import_timeout_s": 0.0}})},
        "got import_timeout_s=0 and kv_lease_duration=30; need import_timeout_s > 0 and",
    ),
    (
        {"entry": multi(connector(), NIXL | {"kv_connector_extra_config": {"kv_lease_duration": "9"}})},
        "got kv_lease_duration='9' of type str; need int because",
    ),
    (
        {"entry": connector() | {"kv_role": "kv_consumer"}},
        "got kv_role='kv_consumer' for HiSparseConnector; need",
    ),
    ({"entry": multi({k: v for k, v in connector().items() if k != "kv_role"})}, "got kv_role=None for"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ENGINES)
def test_bad_engines(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 the message is compared below
        validate_engine(engine(**changes))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("section", "setting", "value", "message"),
    [
        (
            "attention_config",
            "hisparse_config",
            None,
            "got HiSparseConnector without attention_config.hisparse_config",
        ),
        ("parallel_config", "pipeline_parallel_size", 2, "got pipeline_parallel_size=2; need 1 because"),
        (
            "parallel_config",
            "decode_context_parallel_size",
            2,
            "got decode_context_parallel_size=2; need 1 because",
        ),
        (
            "parallel_config",
            "prefill_context_parallel_size",
            2,
            "got prefill_context_parallel_size=2; need 1 because",
        ),
        ("scheduler_config", "max_num_seqs", 6001, "got max_num_seqs=6001; need at most 6000 because"),
        (
            "compilation_config",
            "cudagraph_mode",
            SimpleNamespace(name="FULL"),
            "got cudagraph_mode=FULL; need",
        ),
        (
            "scheduler_config",
            "scheduler_reserve_full_isl",
            False,
            "got --no-scheduler-reserve-full-isl; need",
        ),
        (
            "scheduler_config",
            "disable_hybrid_kv_cache_manager",
            True,
            "got --disable-hybrid-kv-cache-manager; need",
        ),
    ],
)
def test_engine_settings(section: str, setting: str, value: Any, message: str) -> None:
    vllm_config = engine()
    validate_engine(vllm_config)
    setattr(getattr(vllm_config, section), setting, value)
    with pytest.raises(ValueError) as error:  # noqa: PT011 the message is compared below
        validate_engine(vllm_config)
    assert str(error.value).startswith(message)
    assert " because " in str(error.value)


@pytest.mark.parametrize(
    ("mode", "device", "refused"),
    [
        ("FULL_AND_PIECEWISE", "cuda", True),
        ("PIECEWISE", "cuda", True),
        ("NONE", "cuda", False),
        ("FULL_AND_PIECEWISE", "cpu", False),  # where no graph is ever made
    ],
)
def test_graphs_do_not_record(mode: str, device: str, refused: bool) -> None:
    vllm_config = engine(trace_path="selections.npz")
    vllm_config.compilation_config.cudagraph_mode.name = mode
    vllm_config.device_config.device_type = device
    if refused:
        with pytest.raises(
            ValueError, match=f"got trace_path with cudagraph_mode={mode}; need --enforce-eager"
        ):
            validate_engine(vllm_config)
    else:
        assert validate_engine(vllm_config).trace_path == "selections.npz"


def test_without_any_connector() -> None:
    vllm_config = engine()
    vllm_config.kv_transfer_config = None
    with pytest.raises(ValueError, match="got 0 HiSparseConnector entries"):
        validate_engine(vllm_config)
