"""Prompts of another engine, decoded with drafts."""

from pathlib import Path

import pytest

from tests.engine.pd import PLAIN, producer, with_nixl
from tests.engine.test_speculation import MTP, WITH_MTP_LAYER, KnowingDrafts
from tests.engine.workload import ENGINE_ARGS, ModelPath, Reference, differences, prompts
from vllm_hisparse.testing.engine import counters
from vllm_hisparse.testing.harness import hisparse, hisparse_engine
from vllm_hisparse.testing.models import SHARED

pytest.importorskip("nixl")
pytestmark = pytest.mark.engine

LEASE = {"kv_lease_duration": 600}
LENDER = {**PLAIN, "kv_connector_extra_config": LEASE}
READER = with_nixl(hisparse(low_watermark=0.1, high_watermark=0.2), "kv_consumer", **LEASE)


def test_same_bits_with_drafts(model_path: ModelPath, reference: Reference, tmp_path: Path) -> None:
    """With a draft layer of the model's own, whose rows and keys come along."""
    path, expected = model_path(WITH_MTP_LAYER), reference(SHARED, "float32")
    requests = prompts((16, 10, 14, 12), count=6)
    args = {"dtype": "float32", "speculative_config": MTP, "async_scheduling": False, **ENGINE_ARGS}
    with (
        producer(path, tmp_path / "log", LENDER, **args) as remote,
        hisparse_engine(path, num_gpu_blocks_override=48, kv_transfer_config=READER, **args) as engine,
    ):
        KnowingDrafts(engine, expected)
        transfers = remote.prefill(requests)
        ids = [engine.add(p, kv_transfer_params=x) for p, x in zip(requests, transfers, strict=True)]
        engine.drain(engine.check_integrity)
        engine.finish()
        assert differences([engine.completions[i] for i in ids], expected) == []
        imports = engine.coordinator.imports.counters
        assert imports.arrived == len(ids) and imports.host > 0 and imports.device > 0
        assert counters(engine.llm)["vllm:spec_decode_num_accepted_tokens"] > 0
