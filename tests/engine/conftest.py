import pytest

from tests.engine.workload import NUM_TOKENS, WORDS, ModelPath, Reference
from vllm_hisparse import cpu
from vllm_hisparse.testing.engine import Completion, complete, engine
from vllm_hisparse.testing.models import TinyModel, make_model

pytest.importorskip("vllm")

collect_ignore_glob = [] if cpu.is_cpu_build() else ["test_*.py"]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> ModelPath:
    """Directory of a tiny model."""
    root = tmp_path_factory.mktemp("models")
    return lambda model: make_model(root, model)


@pytest.fixture(scope="session")
def reference(model_path: ModelPath) -> Reference:
    """Completions of `WORDS` by (model, dtype): HiSparse off, a pool that holds everything. Run once each."""
    done: dict[tuple[TinyModel, str], list[Completion]] = {}

    def run(model: TinyModel, dtype: str) -> list[Completion]:
        if (model, dtype) not in done:
            with engine(model_path(model), dtype=dtype) as llm:
                done[model, dtype] = complete(llm, WORDS, NUM_TOKENS)
        return done[model, dtype]

    return run
