"""One engine of `engine.py` or `identity.py`: a process of its own. Reads a `Run` as JSON from the command
line,
writes what it saw as JSON to the file that the run names.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from watching import GraphTimes, RoundCutOff, Schedule

NUM_LOGPROBS = 4
REPORTED = {
    "resident": "resident_rows",
    "hits": "hits",
    "misses": "misses",
    "unreadable": "unreadable_rows",
}  # metrics that ranks in other processes report, by the name that one in this process has for them
# HiSparse computes prefills with the sparse kernels; so does what it is compared with.
SPARSE_PREFILLS = {"sparse_mla_force_mqa": True}  # of vLLM's attention_config
PATTERNS = {
    "separate": "FFFFFFFF",
    "shared": "FSSSFSSS",
}  # F runs the indexer, S shares the selection before it


@dataclass(frozen=True)
class Run:
    """What one engine is and does."""

    out: str  # result file
    models: str  # folder of models
    impl: str = "ours"  # plain, offload, in_tree, ours, ours_keys, ours_skip_io, ours_by_layer
    model: str = "separate"
    kv_gib: float = 4.0
    host_gib: float = 8.0
    requests: int = 8
    context: int = 4096
    shorter: int = 17  # each prompt is this much shorter than the one before
    num_tokens: int = 64
    first_tokens: int = 0  # in the first of several rounds, which fills the caches; 0: num_tokens
    rounds: int = 1
    limit_s: float = 0  # of a round, which is then cut off; 0: none
    in_turn: bool = False  # start, then wait until the parent wants a round: see `processes.run_in_turn`
    max_model_len: int = 0  # 0: what is needed
    max_batched_tokens: int = 8192
    max_num_seqs: int = 16
    kv_cache_dtype: str = "fp8"
    cudagraph_mode: str = ""  # vLLM's default
    eager: bool = False
    ranks: int = 1  # of tensor parallelism, a GPU each
    draft_tokens: int = 0  # ngram
    exact: bool = False  # selections without chance, so that outputs can be compared
    churn: float = 0.0  # replay selections, this much of each fresh
    staging_mib: int = 256
    low: float = 0.08
    high: float = 0.20
    indexer_pages: int = 0  # 0: the planner's choice
    always_host: bool = False


def engine_options(run: Run) -> dict[str, Any]:
    """Arguments of vllm.LLM."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_model_len": run.max_model_len or run.context + run.num_tokens + 64,
        "kv_cache_dtype": run.kv_cache_dtype,
        "kv_cache_memory_bytes": int(run.kv_gib * 2**30),
        "gpu_memory_utilization": 0.1,
        "max_num_seqs": run.max_num_seqs,
        "max_num_batched_tokens": run.max_batched_tokens,
        "enforce_eager": run.eager,
        "enable_flashinfer_autotune": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
        "disable_log_stats": False,
        "seed": 0,
    }
    if run.ranks > 1:  # by NCCL alone: vLLM's other ways to exchange need what not every machine has
        options |= {"tensor_parallel_size": run.ranks, "disable_custom_all_reduce": True}
        options["compilation_config"]["pass_config"] = {"fuse_allreduce_rms": False}
    if run.cudagraph_mode:
        options["compilation_config"]["cudagraph_mode"] = run.cudagraph_mode
    if run.draft_tokens:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": run.draft_tokens,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        }
    if run.impl in ("plain", "offload"):
        options["attention_config"] = SPARSE_PREFILLS
    if run.impl != "plain":
        options["kv_transfer_config"] = connector(run)
    return options


def connector(run: Run) -> dict[str, Any]:
    """vLLM's kv_transfer_config."""
    if run.impl == "ours_keys":  # of the host's memory, a fifth for keys
        ours = replace(run, impl="ours", host_gib=run.host_gib * 0.8)
        keys = replace(run, impl="offload", host_gib=run.host_gib * 0.2)
        return _connector("MultiConnector", {"connectors": [connector(ours), connector(keys)]})
    name = "OffloadingConnector" if run.impl == "offload" else "HiSparseConnector"
    return _connector(name, connector_options(run))


def _connector(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": options}


def connector_options(run: Run) -> dict[str, Any]:
    if run.impl == "offload":
        return {"cpu_bytes_to_use": int(run.host_gib * 2**30), "offload_prompt_only": False}
    if run.impl == "in_tree":
        return {"host_pool_gib": run.host_gib}
    chosen = {"max_indexer_pages": run.indexer_pages} if run.indexer_pages else {}
    return chosen | {
        "host_pool_gib": run.host_gib,
        "prefill_staging_mib": run.staging_mib,
        "low_watermark": run.low,
        "high_watermark": run.high,
        "skip_io": run.impl == "ours_skip_io",
        "prefetch": run.impl != "ours_by_layer",
        "always_host": run.always_host,
    }


def prompts(run: Run) -> list[dict[str, list[int]]]:
    import torch

    generator = torch.Generator().manual_seed(7)
    lengths = [run.context - i * run.shorter for i in range(run.requests)]
    ids = [torch.randint(5, 31000, (n,), generator=generator).tolist() for n in lengths]
    if run.draft_tokens:  # something for ngram to find: the second half repeats the first
        ids = [x[: len(x) // 2] * 2 for x in ids]
    return [{"prompt_token_ids": x} for x in ids]


def patch_selections(run: Run) -> None:
    """In every process that runs a model."""
    from vllm_hisparse.testing import determinism

    if run.exact:
        determinism.select_without_chance()
        if run.impl == "plain":
            determinism.write_rows_in_two_steps()
            determinism.prefill_in_prefill_kernels()
    if run.churn:
        replay = determinism.Replay(
            num_leaders=PATTERNS[run.model].count("F"),
            num_steps=64,
            num_rows=run.max_num_seqs,
            top_k=2048,
            context=run.context - run.requests * run.shorter,
            churn=run.churn,
        )
        determinism.replay_selections(replay)


def make_model(run: Run) -> Path:
    from vllm_hisparse.testing import models

    model = models.TinyModel(
        widths=models.REAL,
        index_pattern=PATTERNS[run.model],
        index_topk=2048,
        vocab_size=32000,
        max_position_embeddings=1 << 21,
        dtype="bfloat16",
    )
    return models.make_model(Path(run.models), model)


def measure(
    llm: Any, run: Run, schedule: Schedule, graphs: GraphTimes, counters: Counters, num_tokens: int = 0
) -> dict[str, Any]:
    """One round: all prompts at once, each for `num_tokens` (0: the run's).

    Cut off, it reports what it saw.
    """
    from vllm import SamplingParams

    num_tokens = num_tokens or run.num_tokens
    sampling = SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=NUM_LOGPROBS * run.exact or None,
    )
    before = counters.take()
    schedule.take()
    graphs.take_ms()
    given = prompts(run)
    begin = time.perf_counter()
    schedule.deadline = begin + (run.limit_s or float("inf"))
    try:
        results = llm.generate(given, sampling, use_tqdm=False)
    except RoundCutOff:
        results = []
    seconds = time.perf_counter() - begin
    steps, graph_ms = schedule.take(), graphs.take_ms()
    num_produced = (
        run.requests * num_tokens if results else sum(step.tokens.count(1) for step in steps)
    )  # of a round cut off: decodes
    decoding = [
        (step, then)
        for step, then in itertools.pairwise(steps)
        if step.tokens and max(step.tokens) <= 1 + run.draft_tokens
    ]
    busiest = max((len(step.tokens) for step, _ in decoding), default=0)
    full = [(step, then) for step, then in decoding if len(step.tokens) == busiest]
    took = [then.at - step.at for step, then in full]
    after = counters.take()
    looked_up = (
        after.get("hits", 0) + after.get("misses", 0) - before.get("hits", 0) - before.get("misses", 0)
    )
    return {
        "seconds": round(seconds, 3),
        "lead_s": round(full[0][0].at - begin, 3) if full else None,
        "finished": bool(results),
        "tokens_per_s": round(num_produced / seconds, 1),
        "decode_batch": busiest,
        "decode_steps": len(full),
        "tpot_ms": round(median(took) * 1e3, 3) if took else None,
        "mean_step_ms": round(fmean(took) * 1e3, 3) if took else None,
        "fast_step_ms": round(quantiles(took, n=10)[0] * 1e3, 3) if len(took) > 1 else None,
        "decode_tokens_per_s": round(busiest / fmean(took), 1) if took and not run.draft_tokens else None,
        "cpu_ms": round(median(then.cpu - step.cpu for step, then in full) * 1e3, 3) if full else None,
        "graph_ms": round(median(graph_ms), 3) if graph_ms else None,
        "waits": round(fmean(then.waits - step.waits for step, then in full), 2) if full else None,
        "preemptions": after["preemptions"] - before["preemptions"],
        "hit_rate": round((after["hits"] - before["hits"]) / looked_up, 4) if looked_up else None,
        "schedule": _digest([step.tokens for step in steps if step.tokens]),
        "outputs": [
            [list(r.outputs[0].token_ids), _logprobs(r.outputs[0].logprobs)] for r in results
        ] if run.exact else None,
        "tokens": [_digest(list(r.outputs[0].token_ids)) for r in results],
        "distinct": len({t for r in results for t in r.outputs[0].token_ids}),
    }  # fmt: skip


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _logprobs(steps: Any) -> list[list[list[float]]]:
    return [[[t, p.logprob] for t, p in sorted(step.items())] for step in steps]


def leaf(group: Any) -> Any:
    """Our connector, which may be the first below a MultiConnector."""
    return getattr(group, "_connectors", [group])[0]


class Counters:
    """What an engine has counted so far: preemptions and, with HiSparse, rows of a rank."""

    def __init__(self, llm: Any, run: Run) -> None:
        self._llm = llm
        self._run = run
        self._is_ours = run.impl.startswith("ours")
        self._worker: Any = None
        if self._is_ours and run.ranks == 1:  # in this process
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self._worker = leaf(get_kv_transfer_group()).worker

    def take(self) -> dict[str, int]:
        from vllm_hisparse.testing.engine import counters

        reported = counters(self._llm)
        values = {"preemptions": int(reported["vllm:num_preemptions"])}
        if self._worker is not None:
            values |= self._worker.runtime.counters.exact()
        elif self._is_ours:  # every rank resolves the same selections
            for key, name in REPORTED.items():
                values[key] = int(reported.get(f"vllm:hisparse_{name}", 0)) // self._run.ranks
        return values


def mark(run: Run, what: str, number: int = 0) -> Path:
    """A file by which an engine and its parent tell each other `what`: started, turn, done."""
    return Path(run.out).with_suffix(f".{what}-{number}")


def turns(run: Run) -> Iterator[AbstractContextManager[None]]:
    """A block for each round; one that takes turns enters it when the parent wants that round."""
    if run.in_turn:
        mark(run, "started").touch()
    for number in range(run.rounds):
        yield turn(run, number) if run.in_turn else nullcontext()


@contextmanager
def turn(run: Run, number: int) -> Iterator[None]:
    while not mark(run, "turn", number).exists():
        time.sleep(0.05)
    yield
    mark(run, "done", number).touch()


def main() -> None:
    run = Run(**json.loads(sys.argv[1]))
    # Sampling is greedy: FlashInfer's samplers would be compiled for nothing.
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    # The scheduler and the kernels are looked at from here.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Ranks are spawned, see the end of this file, and exchange by NCCL alone, see `engine_options`.
    os.environ.update(
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_ALLREDUCE_USE_SYMM_MEM="0",
        VLLM_ALLREDUCE_USE_FLASHINFER="0",
    )
    if not run.impl.startswith("ours"):
        os.environ["VLLM_PLUGINS"] = "none"
    path = make_model(run)
    patch_selections(run)
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(str(path), **engine_options(run))
    start_s = time.perf_counter() - begin
    core = llm.llm_engine.engine_core.engine_core
    schedule, graphs = Schedule(core.scheduler), GraphTimes()
    counters = Counters(llm, run)
    warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": list(range(100, 400))}], warm, use_tqdm=False)
    result: dict[str, Any] = {"start_s": round(start_s, 1)}
    result["rounds"] = rounds = []
    for i, turn in enumerate(turns(run)):
        with turn:
            rounds.append(measure(llm, run, schedule, graphs, counters, 0 if i else run.first_tokens))
        if not rounds[-1]["finished"]:
            break
    if run.impl.startswith("ours") and rounds[-1]["finished"]:
        coordinator = leaf(core.scheduler.connector).coordinator
        for _ in range(4):
            llm.llm_engine.step()
        coordinator.check_integrity()
        result["pages"] = vars(coordinator.leases.counters)
        result["counters"] = counters.take()
    Path(run.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a rank: it has this program's arguments
    patch_selections(Run(**json.loads(sys.argv[1])))
