"""Shapes read from config.json: against published sizes, vLLM's rules, and the plan that an engine makes."""

import json
from pathlib import Path

import pytest

from tests.planning.engines import KEY_BYTES, PATTERNS, ROW_BYTES, layer_specs
from vllm_hisparse.config import GIB
from vllm_hisparse.planning.groups import make_plan
from vllm_hisparse.planning.machines import GPU_MEMORY_MIB, kv_memory_bytes
from vllm_hisparse.planning.models import BUILT_IN, layer_plan, load_model, read_model
from vllm_hisparse.testing.models import SHARED, config


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_shapes(name: str) -> None:
    model = load_model(name)
    assert model.pattern == PATTERNS[name]
    assert (model.row_bytes("fp8"), model.row_bytes("bf16")) == (ROW_BYTES["fp8"], ROW_BYTES["bf16"])
    assert model.key_bytes == KEY_BYTES
    assert model.top_k == 2048
    assert model.served_pattern(0) == model.pattern
    assert model.served_pattern(3) == model.pattern + "F"


@pytest.mark.parametrize(("name", "billions"), [("glm-5.2", 753), ("deepseek-v3.2", 685)])
def test_parameters_are_the_published_ones(name: str, billions: int) -> None:
    """Norms are left out, and the embeddings that a checkpoint repeats for its MTP layer."""
    assert abs(load_model(name).num_parameters() / 1e9 - billions) < 2


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_the_plan_is_the_one_that_an_engine_makes(name: str, dtype: str) -> None:
    specs = layer_specs(PATTERNS[name], ROW_BYTES[dtype])
    source = {key: spec for key, spec in specs.items() if "indexer" not in key}
    theirs = make_plan(source, {key: spec for key, spec in specs.items() if key not in source}, 16)
    ours = layer_plan(load_model(name), dtype, 0, 16)
    assert ours.geometry == theirs.geometry
    assert [len(g) for g in ours.index_groups] == [len(g) for g in theirs.index_groups]
    assert ours.group_parts == theirs.group_parts


def test_weights_are_split_over_ranks() -> None:
    model = load_model("glm-5.2")
    one, eight = model.weight_bytes(1, 0), model.weight_bytes(8, 0)
    assert one / 8 < eight < one / 8 * 1.05  # every rank holds the down projections and the indexers
    assert model.weight_bytes(8, 1) > eight
    unquantised = read_model({**BUILT_IN["glm-5.2"], "quantization_config": None}, "bf16")
    assert 1.95 < unquantised.weight_bytes(8, 0) / eight < 2.05


def test_kv_memory_grows_with_gpus() -> None:
    model = load_model("deepseek-v3.2")
    assert kv_memory_bytes(model, "h100", 8, 0) < 0  # 80 GiB of weights do not fit
    assert 30 * GIB < kv_memory_bytes(model, "h200", 8, 0) < kv_memory_bytes(model, "h200", 16, 0)
    by_size = sorted(GPU_MEMORY_MIB, key=GPU_MEMORY_MIB.__getitem__)
    memory = [kv_memory_bytes(model, gpu, 16, 0) for gpu in by_size]
    assert memory == sorted(memory)


def test_a_config_is_read_from_a_file_or_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(SHARED)))
    for name in (tmp_path, tmp_path / "config.json"):
        model = load_model(str(name))
        assert model.pattern == "FSS"
        assert model.checkpoint == str(tmp_path)
        assert model.row_bytes("fp32") == 4 * (64 + 16)


def test_a_nested_text_config() -> None:
    nested = read_model({"model_type": "vision", "text_config": BUILT_IN["glm-5.2"]}, "nested")
    assert nested.pattern == PATTERNS["glm-5.2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "need JSON because"),
        ('{"model_type": "llama"}', "got a llama model without index_topk; need a DSA model"),
        ('{"index_topk": 2048}', "without first_k_dense_replace, hidden_size,"),
    ],
)
def test_files_that_say_too_little(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="got") as error:
        load_model(str(tmp_path))
    assert message in str(error.value)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"got model 'glm-4'; need a config.json, its directory, or one of"):
        load_model("glm-4")
