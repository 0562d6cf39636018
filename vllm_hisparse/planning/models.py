"""What planning needs to know of a model: read from its config.json, or built in for two model families.

Imports neither torch, nor vLLM, nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_hisparse.config import user_error

from .geometry import Shape, ceil_div, choose_geometry
from .layout import LayerPlan, index_groups

PAGE_TOKENS = 64  # rows of a page: what the sparse attention and indexer kernels take
SCALE_GROUP = 128  # elements that share one fp32 scale, in fp8 rows and in indexer keys

# Shapes of published checkpoints, as far as memory depends on them. Sources: config.json of zai-org/GLM-5.2
# and deepseek-ai/DeepSeek-V3.2, the defaults of transformers' GlmMoeDsaConfig and DeepseekV32Config. The
# parameters they add up to are the published ones: 753 and 685 billion (test_models.py).
BUILT_IN: dict[str, dict[str, Any]] = {
    "glm-5.2": {
        "checkpoint": "zai-org/GLM-5.2-FP8",
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 1048576,
        "quantization_config": {"quant_method": "fp8"},
    },
    "deepseek-v3.2": {
        "checkpoint": "deepseek-ai/DeepSeek-V3.2",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163840,
        "quantization_config": {"quant_method": "fp8"},
    },
}


OPTIONAL = frozenset({"checkpoint", "num_nextn_predict_layers", "n_shared_experts", "quantization_config"})
NEEDED = tuple(key for key in BUILT_IN["deepseek-v3.2"] if key not in OPTIONAL)


@dataclass(frozen=True)
class Model:
    """A DSA model. `config`: the content of its config.json, with `text_config` flattened."""

    name: str  # built-in name, or the path it was read from
    checkpoint: str  # what `vllm serve` takes
    config: Mapping[str, Any]

    @property
    def top_k(self) -> int:
        return int(self.config["index_topk"])

    @property
    def max_context(self) -> int:
        """Longest context in tokens; 0 if config.json does not say."""
        return int(self.config.get("max_position_embeddings") or 0)

    @cached_property
    def pattern(self) -> str:
        """One letter a layer, without MTP layers: F runs the indexer, S shares the selection before it.

        The rule is vLLM's (deepseek_v2.py): a pattern, or every `index_topk_freq`-th layer from an offset on.
        """
        pattern = self.config.get("index_topk_pattern")
        num_layers = int(self.config["num_hidden_layers"])
        if pattern is not None:
            return "".join(
                "S" if layer < len(pattern) and pattern[layer] == "S" else "F" for layer in range(num_layers)
            )
        period = int(self.config.get("index_topk_freq") or 1)
        offset = int(self.config.get("index_skip_topk_offset", 2))
        return "".join("S" if max(layer - offset + 1, 0) % period else "F" for layer in range(num_layers))

    @property
    def num_mtp_layers(self) -> int:
        return int(self.config.get("num_nextn_predict_layers") or 0)

    def served_pattern(self, speculative_tokens: int) -> str:
        """`pattern`, and the MTP layers if they run: each has an indexer of its own (deepseek_v2.py)."""
        return self.pattern + "F" * (self.num_mtp_layers if speculative_tokens else 0)

    def row_bytes(self, kv_dtype: str) -> int:
        """KV of one token in one layer: the latent and the rotary part.

        fp8: a byte an element of the latent, an fp32 scale each 128, the rotary part in bf16
        (flashmla_sparse.py in vLLM); 656 with a latent of 512 and 64 rotary elements.
        """
        latent, rotary = int(self.config["kv_lora_rank"]), int(self.config["qk_rope_head_dim"])
        if kv_dtype == "fp8":
            return latent + 4 * ceil_div(latent, SCALE_GROUP) + 2 * rotary
        return {"bf16": 2, "fp32": 4}[kv_dtype] * (latent + rotary)

    @property
    def key_bytes(self) -> int:
        """Indexer key of one token in one layer: fp8 with an fp32 scale each 128 elements; 132 with 128."""
        width = int(self.config["index_head_dim"])
        return width + 4 * ceil_div(width, SCALE_GROUP)

    def shape(self, kv_dtype: str, speculative_tokens: int) -> Shape:
        """What blocks have to hold."""
        pattern = self.served_pattern(speculative_tokens)
        return Shape(len(pattern), pattern.count("F"), self.row_bytes(kv_dtype), self.key_bytes, PAGE_TOKENS)

    def weight_bytes(self, tensor_parallel: int, speculative_tokens: int) -> int:
        """Weights on one GPU."""
        split, whole = self.weight_shares(speculative_tokens)
        return ceil_div(split, tensor_parallel) + whole

    def weight_shares(self, speculative_tokens: int) -> tuple[int, int]:
        """Bytes of weights: (split by tensor parallelism, on every rank)."""
        num_layers = int(self.config["num_hidden_layers"])
        kinds = [self._layer_weights(layer) for layer in range(num_layers)]
        if speculative_tokens:
            joint = 2 * int(self.config["hidden_size"]) ** 2  # a hidden state and an embedding become one
            split, whole = self._layer_weights(num_layers)
            kinds += [(split, whole + joint)] * self.num_mtp_layers
        split, whole = (sum(column) for column in zip(*kinds, strict=True))
        embeddings = 2 * int(self.config["vocab_size"]) * int(self.config["hidden_size"])  # in bf16
        item = 1 if self.config.get("quantization_config") else 2
        return item * split + 2 * embeddings, item * whole

    def num_parameters(self) -> int:
        """Of the published checkpoint, MTP layers included; norms are left out."""
        config = self.config
        layers = range(int(config["num_hidden_layers"]) + self.num_mtp_layers)
        hidden = int(config["hidden_size"])
        return (
            sum(sum(self._layer_weights(layer)) for layer in layers)
            + 2 * int(config["vocab_size"]) * hidden
            + self.num_mtp_layers * 2 * hidden**2
        )

    def _layer_weights(self, layer: int) -> tuple[int, int]:
        """Parameters of a layer: (split over ranks, on every rank). The down projections and the indexer of
        MLA are on every rank, as in vLLM's ReplicatedLinear.
        """
        get = self.config.__getitem__
        hidden, heads, q_rank, kv_rank = (
            int(get(key)) for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
        )
        nope, rope, value = (int(get(f"{key}_head_dim")) for key in ("qk_nope", "qk_rope", "v"))
        split = heads * (q_rank * (nope + rope) + kv_rank * (nope + value) + value * hidden)
        whole = hidden * (q_rank + kv_rank + rope)
        if layer >= len(self.pattern) or self.pattern[layer] == "F":
            key, index_heads = int(get("index_head_dim")), int(get("index_n_heads"))
            whole += q_rank * index_heads * key + hidden * (key + index_heads)
        if layer < int(get("first_k_dense_replace")):
            return split + 3 * hidden * int(get("intermediate_size")), whole
        experts = int(get("n_routed_experts"))
        mlps = experts + int(self.config.get("n_shared_experts") or 0)
        return split + 3 * hidden * int(get("moe_intermediate_size")) * mlps, whole + hidden * experts


def load_model(name: str) -> Model:
    """The built-in model of that name, or the one whose config.json (or directory) is at that path.

    Raises ValueError for an unknown name, a file that is not JSON, and a model without an indexer.
    """
    known = BUILT_IN.get(name.lower())
    if known is not None:
        return Model(name.lower(), str(known["checkpoint"]), known)
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise user_error(
            got=f"model {name!r}",
            need=f"a config.json, its directory, or one of {sorted(BUILT_IN)}",
            because="the memory a request needs follows from the model's layers",
        )
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise user_error(
            got=f"{file} ({error})", need="JSON", because="it is read as a config.json"
        ) from error
    return read_model(content, str(file.parent))


def read_model(content: Mapping[str, Any], name: str) -> Model:
    """The model that a config.json describes. Raises ValueError if it is no DSA model, or says too little."""
    config = {**content, **(content.get("text_config") or {})}
    if config.get("index_topk") is None:
        raise user_error(
            got=f"a {config.get('model_type', 'model')} model without index_topk",
            need="a DSA model (top-k sparse attention)",
            because="only rows that an indexer selects are read back",
        )
    missing = sorted(key for key in NEEDED if not isinstance(config.get(key), int))
    if missing:
        raise user_error(
            got=f"a config.json of {name} without {', '.join(missing)}",
            need="them",
            because="rows, keys and weights are sized by them",
        )
    return Model(name, name, config)


def layer_plan(model: Model, kv_dtype: str, speculative_tokens: int, max_indexer_pages: int) -> LayerPlan:
    """The layers in blocks, as `planning.groups.make_plan` places them from vLLM's specs."""
    pattern = model.served_pattern(speculative_tokens)
    names = [f"layers.{layer}" for layer in range(len(pattern))]
    leads = {name: letter == "F" for name, letter in zip(names, pattern, strict=True)}
    return LayerPlan(
        geometry=choose_geometry(model.shape(kv_dtype, speculative_tokens), max_indexer_pages),
        layers=tuple(names),
        index_groups=index_groups(leads),
        indexer_layers=tuple(f"{name}.indexer" for name in names if leads[name]),
    )
