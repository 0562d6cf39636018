"""A program of its own: runs engines as described on standard input, writes what they produced to a file.

Engines whose workers or core are processes need one, with a guard around its entry point.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm_hisparse.testing.engine import DEFAULTS, complete, counters


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(job["model"], **{**DEFAULTS, **job["engine_args"]})
    completions = complete(llm, job["prompts"], job["num_tokens"])
    result = {
        "completions": [[c.token_ids, c.logprobs] for c in completions],
        "counters": counters(llm),
        "gauges": gauges(llm),
        "ranks": ranks(llm),
    }
    llm.llm_engine.engine_core.shutdown()
    return result


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
