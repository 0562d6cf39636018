"""Model, prompts and pools of the demo. What is not chosen here is computed by the planner or measured."""

import random
from typing import TYPE_CHECKING

import msgspec

from vllm_hisparse.config import GIB, MAX_INDEXER_PAGES
from vllm_hisparse.planning.geometry import Shape, ceil_div, choose_geometry

if TYPE_CHECKING:
    from vllm_hisparse.testing.models import TinyModel

__all__ = ["NAMES", "NEW_TOKENS", "PAGE_TOKENS", "Pools", "demo_model", "plan_pools", "prompts"]

NAMES = ("A", "B")
PROMPT_TOKENS = (1000, 940)
NEW_TOKENS = 400
PAGE_TOKENS = 64
POOL_PAGES = 34  # of plain vLLM's blocks: both prompts fit, what they grow to does not
INDEX_PATTERN = "FSS"  # three layers that share one selection
INDEX_TOPK = 32
KEY_BYTES = 132  # an indexer key in vLLM: 128 bytes of fp8 and a scale
MAX_MODEL_LEN = 1536
STEP_TOKENS = 256
STAGING_MIB = 1
FIRST_WORD = 3  # the tokens before it are special


class Pools(msgspec.Struct, frozen=True):
    """Blocks of each run. Plain vLLM and HiSparse get the same bytes, whole blocks of either's own size."""

    plain_block_bytes: int  # 64 tokens of KV and indexer keys of all layers
    hisparse_block_bytes: int
    num_plain_blocks: int
    num_hisparse_blocks: int
    num_reference_blocks: int
    host_pool_gib: float

    @property
    def budget_bytes(self) -> int:
        """What both pools have to fit in."""
        return self.num_plain_blocks * self.plain_block_bytes


def demo_model() -> "TinyModel":
    """A GLM-DSA model with random weights."""
    from vllm_hisparse.testing.models import TinyModel

    return TinyModel(index_pattern=INDEX_PATTERN, index_topk=INDEX_TOPK)


def plan_pools() -> Pools:
    """Pools of equal bytes for plain vLLM and HiSparse, and one that holds everything for the reference."""
    from vllm_hisparse.testing.models import config

    model = config(demo_model())
    shape = Shape(
        num_layers=len(INDEX_PATTERN),
        num_indexer_layers=INDEX_PATTERN.count("F"),
        row_bytes=(model["kv_lora_rank"] + model["qk_rope_head_dim"]) * 4,  # fp32
        indexer_row_bytes=KEY_BYTES,
        page_tokens=PAGE_TOKENS,
    )
    plain = shape.num_layers * shape.page_bytes + shape.num_indexer_layers * shape.indexer_page_bytes
    stride = choose_geometry(shape, MAX_INDEXER_PAGES).block_stride_bytes
    pages = sum(ceil_div(n + NEW_TOKENS, PAGE_TOKENS) for n in PROMPT_TOKENS)
    host_blocks = pages + ceil_div(MAX_MODEL_LEN, PAGE_TOKENS)
    return Pools(
        plain_block_bytes=plain,
        hisparse_block_bytes=stride,
        num_plain_blocks=POOL_PAGES,
        num_hisparse_blocks=POOL_PAGES * plain // stride,
        num_reference_blocks=2 * pages,
        host_pool_gib=(host_blocks + 0.5) * shape.num_layers * shape.page_bytes / GIB,
    )


def prompts() -> dict[str, list[int]]:
    """Token ids of each request's prompt; the same in every run."""
    rng = random.Random(1)
    vocab_size = demo_model().vocab_size
    return {
        name: [rng.randrange(FIRST_WORD, vocab_size) for _ in range(length)]
        for name, length in zip(NAMES, PROMPT_TOKENS, strict=True)
    }
