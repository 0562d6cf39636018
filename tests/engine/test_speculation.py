"""Speculative decoding under pressure: right and wrong drafts change neither tokens nor log probabilities."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.engine.workload import ENGINE_ARGS, WORDS, ModelPath, Reference, differences, prompts
from vllm_hisparse.testing.engine import Completion, counters
from vllm_hisparse.testing.harness import HiSparseEngine, LateCopies, hisparse, hisparse_engine
from vllm_hisparse.testing.models import SHARED

pytestmark = pytest.mark.engine

NUM_DRAFTS = 2
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}


class KnowingDrafts:
    """Drafts of somebody who knows the completions, and errs at every fifth position.

    Random weights never repeat themselves, so what vLLM's n-gram speculator finds is never right.
    """

    def __init__(self, engine: HiSparseEngine, completions: Sequence[Completion]) -> None:
        self._speculator = engine.core.model_executor.driver_worker.worker.model_runner.speculator
        self._propose = self._speculator.propose
        self._sequences = [
            [*words, *completion.token_ids] for words, completion in zip(WORDS, completions, strict=True)
        ]
        self._speculator.propose = self

    def __call__(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = self._propose(input_batch, *args, **kwargs)
        states = self._speculator.req_states
        for row, index in enumerate(input_batch.idx_mapping[: len(drafts)].tolist()):
            length = int(states.total_len.gpu[index])
            known = states.all_token_ids.gpu[index, :length].tolist()
            for sequence in self._sequences:
                if sequence[:length] == known:
                    rest = sequence[length : length + NUM_DRAFTS]
                    for i, token in enumerate(rest):
                        drafts[row, i] = token if (length + i) % 5 else (token + 1) % SHARED.vocab_size
        return drafts


def test_same_bits_with_drafts(model_path: ModelPath, reference: Reference) -> None:
    expected = reference(SHARED, "float32")
    with hisparse_engine(
        model_path(SHARED),
        dtype="float32",
        num_gpu_blocks_override=48,
        kv_transfer_config=hisparse(),
        speculative_config=NGRAM,
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
