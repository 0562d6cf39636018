"""The platform's part in the making of a VllmConfig."""

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import AttentionConfig, CompilationMode, KVTransferConfig, VllmConfig
from vllm.config.attention import HiSparseConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_hisparse import cpu
from vllm_hisparse.cpu import platform
from vllm_hisparse.testing.models import make_model

HISPARSE = {
    "kv_connector": "HiSparseConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_pool_gib": 1},
}
MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [HISPARSE]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock platform sets variables too: keep them inside the test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def configure(model: Path, **options: Any) -> VllmConfig:
    return EngineArgs(
        str(model), skip_tokenizer_init=True, max_model_len=512, **options
    ).create_engine_config()


def test_platform_is_ours() -> None:
    assert isinstance(current_platform, platform.HiSparseCpuPlatform)


def test_no_effect_on_other_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.vllm_version_matches_substr", lambda substr: False)
    assert cpu.platform_plugin() is None
    cpu.register()


def test_registering_again_is_harmless() -> None:
    cpu.register()
    cpu.register()
    assert cpu.platform_plugin() == "vllm_hisparse.cpu.platform.HiSparseCpuPlatform"


def test_dsa_defaults(model: Path) -> None:
    config = configure(model, max_num_batched_tokens=96)
    assert config.attention_config.hisparse_config is None
    assert config.cache_config.block_size == 64
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == 96
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.compilation_config.custom_ops.count(platform.ROTARY_OFF) == 1
    assert config.use_v2_model_runner
    assert config.parallel_config.worker_cls == platform.WORKER


@pytest.mark.parametrize("asynchronous", [True, False])
def test_async_scheduling_is_the_users_choice(model: Path, asynchronous: bool) -> None:
    assert configure(model, async_scheduling=asynchronous).scheduler_config.async_scheduling is asynchronous


@pytest.mark.parametrize("transfer", [HISPARSE, MULTI])
def test_flag_survives_the_cuda_check(model: Path, transfer: dict[str, Any]) -> None:
    given = KVTransferConfig(**transfer)
    before = copy.deepcopy(given)
    config = configure(model, kv_transfer_config=given)
    assert config.kv_transfer_config == before == given
    assert config.attention_config.hisparse_config == HiSparseConfig()
    assert platform._HIDDEN not in vars(config)


def test_options_survive(model: Path) -> None:
    options = AttentionConfig(hisparse_config=HiSparseConfig(device_buffer_size=100))
    config = configure(model, attention_config=options, kv_transfer_config=KVTransferConfig(**HISPARSE))
    assert config.attention_config.hisparse_config == HiSparseConfig(device_buffer_size=100)


def test_options_without_a_connector_are_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="got 0 HiSparseConnector entries"):
        configure(model, attention_config=AttentionConfig(hisparse_config=HiSparseConfig()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "got pipeline_parallel_size=2; need 1"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "got decode_context_parallel_size=2",
        ),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "got cudagraph_mode=FULL; need"),
        ({"scheduler_reserve_full_isl": False}, "got --no-scheduler-reserve-full-isl; need"),
        ({"block_size": 16}, "got block_size=16; need a multiple of 64"),
    ],
)
def test_repeated_checks(model: Path, options: dict[str, Any], message: str) -> None:
    given = KVTransferConfig(**HISPARSE)
    with pytest.raises(ValueError, match=message):
        configure(model, kv_transfer_config=given, **options)
    assert given.kv_connector == "HiSparseConnector"  # the caller's object is as it was


def test_model_must_be_dsa(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(model, kv_transfer_config=KVTransferConfig(**HISPARSE))
    llama = SimpleNamespace(model_type="llama")
    monkeypatch.setattr(config.model_config, "hf_config", llama)
    monkeypatch.setattr(config.model_config, "hf_text_config", llama)
    platform.hide_hisparse(config)
    with pytest.raises(ValueError, match="got a llama model without index_topk; need"):
        platform.restore_hisparse(config)


def test_triton_is_needed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    with pytest.raises(ValueError, match="got no usable Triton; need"):
        configure(model)


def test_users_environment_stands(model: Path) -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    os.environ.pop("TORCH_COMPILE_DISABLE", None)
    configure(model)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"
