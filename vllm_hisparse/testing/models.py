"""Tiny DSA models with random weights, for engines on the CPU.

Their outputs mean nothing, but differ between prompts, and their selections move from token to token: a row
fetched from the wrong place changes the output.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

INDEX_DIM = 128  # the only one that vLLM's indexer quantises as one group
EXPERTS_PER_TOKEN = 2


ARCHITECTURES = {"glm_moe_dsa": "GlmMoeDsaForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM"}
GAINS = {"q_b_proj": 3.0, "wk": 2.0, "weights_proj": 2.0, "gate.weight": 2.0, "o_proj": 2.0, "down_proj": 2.0}


@dataclass(frozen=True)
class Widths:
    """Sizes of a model's parts, in elements."""

    hidden: int = 128
    intermediate: int = 256
    expert_intermediate: int = 64
    num_experts: int = (
        32  # whole vectors of router scores: a sigmoid rounds differently in the tail of a vector
    )
    heads: int = 4
    q_rank: int = 64
    kv_rank: int = 64
    nope: int = 32
    rope: int = 16
    value: int = 32
    index_heads: int = 4
    dense_layers: int = 1  # the rest routes to experts


TINY = Widths()
# Attention and indexer as in GLM-5.2, so that its kernels run; otherwise dense and narrow.
REAL = Widths(
    hidden=2048,
    intermediate=4096,
    expert_intermediate=512,
    num_experts=8,
    heads=64,
    q_rank=1024,
    kv_rank=512,
    nope=128,
    rope=64,
    value=128,
    index_heads=32,
    dense_layers=1024,
)


@dataclass(frozen=True)
class TinyModel:
    """What can be chosen of a tiny model. Equal values give equal files.

    Attributes:
        architecture: GLM-DSA or DeepSeek-V3.2.
        index_pattern: one letter a layer, F runs the indexer and S shares the selection of the layer before;
            the first must be F.
        dtype: of the weights on disk. Tell the engine too: to vLLM, "auto" with fp32 weights means bf16.
        seed: of the weights.
    """

    architecture: Literal["glm_moe_dsa", "deepseek_v32"] = "glm_moe_dsa"
    index_pattern: str = "FFF"
    index_topk: int = 32
    vocab_size: int = 512
    max_position_embeddings: int = 4096
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    num_mtp_layers: int = 0  # 1: a draft layer of its own after the last
    widths: Widths = TINY

    def __post_init__(self) -> None:
        if not self.index_pattern.startswith("F") or set(self.index_pattern) - {"F", "S"}:
            raise ValueError(
                f"got index_pattern={self.index_pattern!r}; need F and S, F first, because only a "
                "selection that exists can be shared"
            )

    @property
    def name(self) -> str:
        """Directory name that tells apart any two models."""
        own = [str(value) for key, value in asdict(self).items() if key != "widths"]
        return "-".join([*own, *(str(value) for value in asdict(self.widths).values())])


SEPARATE = TinyModel()
SHARED = replace(SEPARATE, index_pattern="FSS")
DEEPSEEK = replace(SEPARATE, architecture="deepseek_v32")


def make_model(root: Path, model: TinyModel = SEPARATE) -> Path:
    """Directory below `root` with config, weights and tokenizer; written unless it is already there."""
    from safetensors.torch import save_file

    path = root / model.name
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights(model)), path / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(model, path)
    (path / "config.json").write_text(json.dumps(config(model), indent=1))  # last: the rest is there
    return path


def config(model: TinyModel) -> dict[str, Any]:
    """Content of config.json."""
    widths = model.widths
    result: dict[str, Any] = {
        "model_type": model.architecture,
        "architectures": [ARCHITECTURES[model.architecture]],
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": widths.hidden,
        "intermediate_size": widths.intermediate,
        "moe_intermediate_size": widths.expert_intermediate,
        "num_hidden_layers": len(model.index_pattern),
        "num_attention_heads": widths.heads,
        "num_key_value_heads": widths.heads,
        "n_shared_experts": 1,
        "n_routed_experts": widths.num_experts,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": min(widths.dense_layers, len(model.index_pattern)),
        "moe_layer_freq": 1,
        "q_lora_rank": widths.q_rank,
        "kv_lora_rank": widths.kv_rank,
        "qk_nope_head_dim": widths.nope,
        "qk_rope_head_dim": widths.rope,
        "v_head_dim": widths.value,
        "index_topk": model.index_topk,
        "index_head_dim": INDEX_DIM,
        "index_n_heads": widths.index_heads,
        "index_topk_pattern": model.index_pattern,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if model.num_mtp_layers:
        result["num_nextn_predict_layers"] = model.num_mtp_layers
    if model.architecture == "glm_moe_dsa":
        result["indexer_rope_interleave"] = True
        result["indexer_types"] = [{"F": "full", "S": "shared"}[letter] for letter in model.index_pattern]
    return result


def weights(model: TinyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight, each from a generator of its own."""
    dtype = getattr(torch, model.dtype)
    for name, shape in _shapes(model):
        if name.endswith("e_score_correction_bias"):
            yield name, torch.zeros(shape)
        elif "norm" in name:
            yield name, (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=dtype)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + model.seed)
            yield name, (torch.randn(shape, generator=generator) * _spread(name, shape)).to(dtype)


def _spread(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation. Gains above 1 make attention, selection and routing decide rather than average."""
    if "embed_tokens" in name:
        return 1.0
    gain = next((value for key, value in GAINS.items() if key in name), 1.0)
    return gain / math.sqrt(shape[-1])


def _shapes(model: TinyModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    widths = model.widths
    yield "model.embed_tokens.weight", (model.vocab_size, widths.hidden)
    first_mtp_layer = len(model.index_pattern)
    for layer, letter in enumerate(model.index_pattern + "F" * model.num_mtp_layers):
        prefix = f"model.layers.{layer}."
        if layer >= first_mtp_layer:
            yield from ((prefix + name, shape) for name, shape in _mtp_shapes(model))
        yield prefix + "input_layernorm.weight", (widths.hidden,)
        yield prefix + "post_attention_layernorm.weight", (widths.hidden,)
        yield from (
            (f"{prefix}self_attn.{name}", shape) for name, shape in _attention_shapes(widths, letter == "F")
        )
        yield from (
            (f"{prefix}mlp.{name}", shape)
            for name, shape in _mlp_shapes(widths, dense=layer < widths.dense_layers)
        )
    yield "model.norm.weight", (widths.hidden,)
    yield "lm_head.weight", (model.vocab_size, widths.hidden)


def _mtp_shapes(model: TinyModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What a draft layer has beyond a layer's: it joins a token's embedding and the model's hidden state."""
    hidden = model.widths.hidden
    yield "enorm.weight", (hidden,)
    yield "hnorm.weight", (hidden,)
    yield "eh_proj.weight", (hidden, 2 * hidden)
    yield "embed_tokens.weight", (model.vocab_size, hidden)
    yield "shared_head.norm.weight", (hidden,)
    yield "shared_head.head.weight", (model.vocab_size, hidden)


def _attention_shapes(widths: Widths, has_indexer: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "q_a_proj.weight", (widths.q_rank, widths.hidden)
    yield "q_a_layernorm.weight", (widths.q_rank,)
    yield "q_b_proj.weight", (widths.heads * (widths.nope + widths.rope), widths.q_rank)
    yield "kv_a_proj_with_mqa.weight", (widths.kv_rank + widths.rope, widths.hidden)
    yield "kv_a_layernorm.weight", (widths.kv_rank,)
    yield "kv_b_proj.weight", (widths.heads * (widths.nope + widths.value), widths.kv_rank)
    yield "o_proj.weight", (widths.hidden, widths.heads * widths.value)
    if has_indexer:
        yield "indexer.wq_b.weight", (widths.index_heads * INDEX_DIM, widths.q_rank)
        yield "indexer.wk.weight", (INDEX_DIM, widths.hidden)
        yield "indexer.k_norm.weight", (INDEX_DIM,)
        yield "indexer.k_norm.bias", (INDEX_DIM,)
        yield "indexer.weights_proj.weight", (widths.index_heads, widths.hidden)


def _mlp_shapes(widths: Widths, dense: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    if dense:
        yield from _gated_shapes(widths, "", widths.intermediate)
        return
    yield "gate.weight", (widths.num_experts, widths.hidden)
    yield "gate.e_score_correction_bias", (widths.num_experts,)
    yield from _gated_shapes(widths, "shared_experts.", widths.expert_intermediate)
    for expert in range(widths.num_experts):
        yield from _gated_shapes(widths, f"experts.{expert}.", widths.expert_intermediate)


def _gated_shapes(widths: Widths, prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (width, widths.hidden)
    yield prefix + "up_proj.weight", (width, widths.hidden)
    yield prefix + "down_proj.weight", (widths.hidden, width)


def _save_tokenizer(model: TinyModel, path: Path) -> None:
    """One word a token: w3, w4, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<unk>"]
    words = special + [f"w{i}" for i in range(len(special), model.vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(path)
