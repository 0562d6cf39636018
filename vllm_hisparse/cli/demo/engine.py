"""The engine process: `python -m vllm_hisparse.cli.demo.engine MODE DIRECTORY`.

Writes frames to its stdout as it was at the start; whatever vLLM prints goes to stderr. When the engine is
ready it waits for a line on stdin, so that a run can be prepared while another one is still going.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from vllm_hisparse.cli.demo import sizes
from vllm_hisparse.cli.demo.frames import Finished, Frame, Mode, Output, Pool, Refused, Started
from vllm_hisparse.cli.demo.observe import Observer, make_observer

NUM_LOGPROBS = 3
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in this process, to be looked at
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(mode: Mode, directory: Path) -> None:
    """One run, from the model's files to the outputs."""
    send = _sender()
    os.environ.update(ENVIRONMENT)
    if (problem := find_problem()) is not None:
        send(Refused(problem))
        return
    began = time.monotonic()
    llm = make_engine(mode, directory)
    core = llm.llm_engine.engine_core.engine_core
    observer = make_observer(core.scheduler)
    versions = {name: version(name) for name in ("vllm-hisparse", "vllm", "torch")}
    versions["python"] = sys.version.split()[0]
    send(Started(read_pool(core), versions, time.monotonic() - began))
    if not sys.stdin.readline():
        return  # the demo is gone
    began = time.monotonic()
    outputs = _generate(llm, observer, send)
    send(Finished(outputs, read_num_preemptions(llm), time.monotonic() - began))


def find_problem() -> str | None:
    """Why the demo cannot run with the installed vLLM, or None."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return None
    return (
        f"got vLLM {version('vllm')} for {current_platform.device_name or 'no device'}; need its CPU build "
        "because the demo's model is tiny, and the sparse attention kernels of other builds take full-size "
        "heads only. `./run demo` of the source tree sets up an environment with it; on this one, serve a "
        "real DSA model with HiSparseConnector"
    )


def make_engine(mode: Mode, directory: Path) -> Any:
    """The run's LLM. Its model is made below `directory` unless it is there."""
    from vllm import LLM

    from vllm_hisparse.testing.models import make_model

    pools = sizes.plan_pools()
    options: dict[str, Any] = {}
    num_blocks = pools.num_plain_blocks
    if mode is Mode.REFERENCE:
        num_blocks = pools.num_reference_blocks
    elif mode is Mode.HISPARSE:
        num_blocks = pools.num_hisparse_blocks
        extra = {"host_pool_gib": pools.host_pool_gib, "prefill_staging_mib": sizes.STAGING_MIB}
        options["kv_transfer_config"] = {
            "kv_connector": "HiSparseConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    return LLM(
        str(make_model(directory, sizes.demo_model())),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=sizes.MAX_MODEL_LEN,
        max_num_seqs=len(sizes.NAMES),
        max_num_batched_tokens=sizes.STEP_TOKENS,
        kv_cache_memory_bytes=256 << 20,  # an upper bound; the override decides
        num_gpu_blocks_override=num_blocks,
        disable_log_stats=False,  # keeps the counters
        seed=0,
        **options,
    )


def read_pool(core: Any) -> Pool:
    """The pools as allocated. Raises RuntimeError if HiSparse got more bytes than plain vLLM."""
    from vllm_hisparse.planning.pools import device_overhead_bytes

    budget = sizes.plan_pools().budget_bytes
    coordinator = getattr(core.scheduler.connector, "coordinator", None)
    if coordinator is None:
        config = core.scheduler.kv_cache_config
        return Pool(config.num_blocks, config.kv_cache_tensors[0].size // config.num_blocks, budget)
    layout = coordinator.layout
    if layout.device_pool_bytes > budget:
        raise RuntimeError(f"HiSparse's pool has {layout.device_pool_bytes} bytes, more than {budget}")
    return Pool(
        num_blocks=layout.num_device_blocks,
        block_bytes=layout.block_stride_bytes,
        budget_bytes=budget,
        beside_bytes=device_overhead_bytes(core.vllm_config, layout, layout.num_regions),
        num_host_blocks=layout.num_host_blocks,
        host_block_bytes=layout.host_block_bytes,
    )


def _generate(llm: Any, observer: Observer, send: Callable[[Frame], None]) -> dict[str, Output]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=sizes.NEW_TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=NUM_LOGPROBS
    )
    for name, prompt in sizes.prompts().items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    latest: dict[str, Any] = {}
    for outputs in _steps(llm.llm_engine):
        latest.update((output.request_id, output.outputs[0]) for output in outputs)
        send(observer.step({name: output.token_ids for name, output in latest.items()}))
    return {name: _output(output) for name, output in latest.items()}


def _steps(engine: Any) -> Iterator[list[Any]]:
    """Outputs of every engine step while a request is unfinished."""
    while engine.has_unfinished_requests():
        yield engine.step()


def _output(completion: Any) -> Output:
    steps = (sorted((token, p.logprob.hex()) for token, p in step.items()) for step in completion.logprobs)
    return Output(tuple(completion.token_ids), tuple(tuple(step) for step in steps))


def read_num_preemptions(llm: Any) -> int:
    """vLLM's counter since the engine's start."""
    from vllm.v1.metrics.reader import Counter

    found = [
        m.value for m in llm.get_metrics() if isinstance(m, Counter) and m.name == "vllm:num_preemptions"
    ]
    return int(sum(found))


def _sender() -> Callable[[Frame], None]:
    """Takes stdout for frames; from now on fd 1 is stderr."""
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    encoder = msgspec.json.Encoder()

    def send(frame: Frame) -> None:
        stream.write(encoder.encode(frame) + b"\n")
        stream.flush()

    return send


if __name__ == "__main__":
    main(Mode(sys.argv[1]), Path(sys.argv[2]))
