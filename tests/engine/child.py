"""A program of its own: runs engines as described on standard input, writes what they produced to a file.

Engines whose workers or core are processes need one, with a guard around its entry point.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from vllm_hisparse.testing.engine import DEFAULTS, complete, counters, greedy

STEPS_BEFORE_KILL = 5


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One engine: rounds of the same prompts, each after a function of planted.py has run in the workers."""
    from vllm import LLM

    from tests.engine import planted

    llm = LLM(job["model"], **{**DEFAULTS, **job["engine_args"]})
    result: dict[str, Any] = {"rounds": []}
    for name in job["rounds"]:
        if name is not None:
            assert llm.reset_prefix_cache()
            llm.collective_rpc(getattr(planted, name))
        completions = complete(llm, job["prompts"], job["num_tokens"], job["transfers"])
        result["rounds"].append(
            {
                "completions": [[c.token_ids, c.logprobs] for c in completions],
                "counters": counters(llm),
                "gauges": gauges(llm),
                "ranks": ranks(llm),
            }
        )
    if job["kill_rank"] is not None:
        result["pools"] = llm.collective_rpc(planted.pool)
        result["errors"] = errors_after_kill(llm, job["prompts"], result["pools"][job["kill_rank"]][0])
    llm.llm_engine.engine_core.shutdown()
    return result


def errors_after_kill(llm: Any, prompts: list[list[int]], process: int) -> list[str]:
    """Names of the errors that a client of a running engine sees once a worker is gone: its requests', and a
    new one's.
    """
    engine = llm.llm_engine
    for i, prompt in enumerate(prompts):
        engine.add_request(f"doomed-{i}", {"prompt_token_ids": prompt}, greedy(100))
    for _ in range(STEPS_BEFORE_KILL):
        engine.step()
    os.kill(process, signal.SIGKILL)
    errors = []
    try:
        while engine.has_unfinished_requests():
            engine.step()
    except Exception as error:
        errors.append(type(error).__name__)
    try:
        complete(llm, prompts[:1], 1)
    except Exception as error:
        errors.append(type(error).__name__)
    return errors


def gauges(llm: Any) -> dict[str, float]:
    """HiSparse's gauges without a label of their own."""
    from vllm.v1.metrics.reader import Gauge

    found = [m for m in llm.get_metrics() if isinstance(m, Gauge) and m.name.startswith("vllm:hisparse_")]
    return {m.name: m.value for m in found}


def ranks(llm: Any) -> dict[str, dict[str, float]]:
    """HiSparse's counters by rank and name."""
    from vllm.v1.metrics.reader import Counter

    found: dict[str, dict[str, float]] = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Counter) and "rank" in metric.labels:
            found.setdefault(metric.labels["rank"], {})[metric.name] = metric.value
    return found


def main() -> None:
    jobs = json.load(sys.stdin)
    Path(sys.argv[1]).write_text(json.dumps([run(job) for job in jobs]))


if __name__ == "__main__":
    main()
