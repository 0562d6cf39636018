"""The tiny models are what they say, and reproducible."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_hisparse.testing.models import DEEPSEEK, SEPARATE, SHARED, TinyModel, make_model, weights


def test_equal_models_have_equal_weights() -> None:
    first, again, other = (dict(weights(m)) for m in (SEPARATE, TinyModel(), replace(SEPARATE, seed=1)))
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(
        first["model.layers.0.self_attn.o_proj.weight"], first["model.layers.1.self_attn.o_proj.weight"]
    )


def test_sharing_layers_have_no_indexer() -> None:
    indexers = {name.split(".")[2] for name, _ in weights(SHARED) if ".indexer." in name}
    assert indexers == {"0"}


def test_files(tmp_path: Path) -> None:
    path = make_model(tmp_path, SHARED)
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert make_model(tmp_path, SHARED) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    assert make_model(tmp_path, DEEPSEEK) != path
    config = json.loads((path / "config.json").read_text())
    assert config["indexer_types"] == ["full", "shared", "shared"]
    assert config["index_topk_pattern"] == "FSS"
    assert load_file(path / "model.safetensors").keys() == dict(weights(SHARED)).keys()


def test_tokenizer_has_a_word_for_every_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path))
    assert tokenizer.encode("w3 w511 nonsense") == [3, 511, tokenizer.unk_token_id]
    assert tokenizer.decode([3, 511]) == "w3 w511"


@pytest.mark.parametrize("pattern", ["", "SF", "FX"])
def test_bad_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match="got index_pattern="):
        TinyModel(index_pattern=pattern)
