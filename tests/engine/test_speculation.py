"""Speculative decoding under pressure: right and wrong drafts change neither tokens nor log probabilities."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.workload import ENGINE_ARGS, WORDS, ModelPath, Reference, differences, prompts
from vllm_hisparse.testing.engine import Completion, counters
from vllm_hisparse.testing.harness import HiSparseEngine, LateCopies, hisparse, hisparse_engine
from vllm_hisparse.testing.models import SHARED, TinyModel

pytestmark = pytest.mark.engine

NUM_DRAFTS = 2
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}
MTP = {
    "method": "mtp",
    "num_speculative_tokens": NUM_DRAFTS,
}  # the model's own draft layer, KV and indexer included
WITH_MTP_LAYER = replace(SHARED, num_mtp_layers=1)  # otherwise the same weights


class KnowingDrafts:
    """Drafts of somebody who knows the completions, and errs at every fifth position.

    Random weights never repeat themselves, so what vLLM's n-gram speculator finds is never right.
    """

    def __init__(self, engine: HiSparseEngine, completions: Sequence[Completion]) -> None:
        runner = engine.core.model_executor.driver_worker.worker.model_runner
        self._states = runner.req_states
        self._propose = runner.speculator.propose
        self._sequences = [
            [*words, *completion.token_ids] for words, completion in zip(WORDS, completions, strict=True)
        ]
        runner.speculator.propose = self

    def __call__(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = self._propose(input_batch, *args, **kwargs)
        states = self._states
        for row, index in enumerate(input_batch.idx_mapping[: len(drafts)].tolist()):
            length = int(states.total_len.gpu[index])
            known = states.all_token_ids.gpu[index, :length].tolist()
            for sequence in self._sequences:
                if sequence[:length] == known:
                    rest = sequence[length : length + NUM_DRAFTS]
                    for i, token in enumerate(rest):
                        drafts[row, i] = token if (length + i) % 5 else (token + 1) % SHARED.vocab_size
        return drafts


@pytest.mark.parametrize(
    ("model", "speculation"), [(SHARED, NGRAM), (WITH_MTP_LAYER, MTP)], ids=["ngram", "mtp"]
)
def test_same_bits_with_drafts(
    model_path: ModelPath, reference: Reference, model: TinyModel, speculation: dict[str, Any]
) -> None:
    expected = reference(SHARED, "float32")
    with hisparse_engine(
        model_path(model),
        dtype="float32",
        num_gpu_blocks_override=48,
        kv_transfer_config=hisparse(),
        speculative_config=speculation,
        async_scheduling=False,
        **ENGINE_ARGS,
    ) as engine:
        engine.use_copies(LateCopies(2))
        KnowingDrafts(engine, expected)
        completions = engine.run(prompts(), engine.check_integrity)
        engine.finish()
        assert engine.coordinator.config.verify_rows == 1 + NUM_DRAFTS
        assert min(engine.pages["spilled"], engine.pages["lost"], engine.rows["misses"]) > 0
        counted = counters(engine.llm)
    assert differences(completions, expected) == []
    drafted = counted["vllm:spec_decode_num_draft_tokens"]
    assert 0.3 < counted["vllm:spec_decode_num_accepted_tokens"] / drafted < 0.9
