"""An engine in a program of its own that computes prompts for others: commands on standard input, answers on
standard output, one line of JSON each.

    {"prefill": [[token, ...], ...]}   -> {"params": [kv_transfer_params, ...], "tokens": [first token, ...]}
    {"held": true}                     -> {"held": requests whose pages it still lends}
    {"pages": true}                    -> what happened to its pages, with HiSparse
    {"check": true}                    -> {"leaked": blocks leased although nothing is lent}

Between commands it goes on stepping, as an engine with a server in front of it does.
"""

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from vllm_hisparse.testing.engine import DEFAULTS, greedy


class Producer:
    """Owns the engine; all methods are called by `serve`."""

    def __init__(self, model: Path, engine_args: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(str(model), **{**DEFAULTS, **engine_args})
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.num_prompts = 0

    def prefill(self, prompts: list[list[int]]) -> dict[str, Any]:
        ids = [f"p{self.num_prompts + i}" for i in range(len(prompts))]
        self.num_prompts += len(prompts)
        for request_id, prompt in zip(ids, prompts, strict=True):
            params = greedy(1)
            params.extra_args = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
            self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        done: dict[str, Any] = {}
        while len(done) < len(ids):
            done.update((out.request_id, out) for out in self.llm.llm_engine.step() if out.finished)
        return {
            "params": [done[i].kv_transfer_params for i in ids],
            "tokens": [done[i].outputs[0].token_ids[0] for i in ids],
        }

    def step(self) -> None:
        """Whatever is left to do: hands are shaken and reads end without any request of ours."""
        if self.scheduler.has_requests():
            self.llm.llm_engine.engine_core.engine_core.step_fn()

    def held(self) -> int:
        return len(self.scheduler.requests)

    def pages(self) -> dict[str, int]:
        return dict(vars(self.scheduler.connector._connectors[0].coordinator.leases.counters))

    def leaked(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        pools = [pool]
        for connector in getattr(self.scheduler.connector, "_connectors", ()):
            if (coordinator := getattr(connector, "coordinator", None)) is not None:
                coordinator.check_integrity()
                pools.append(coordinator.host_pool)
        return sum(p.num_gpu_blocks - 1 - p.get_num_free_blocks() for p in pools)


def serve(producer: Producer, answers: Any) -> None:
    """Until standard input ends."""
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.005)
        if not readable:
            producer.step()
            continue
        line = sys.stdin.readline()
        if not line:
            return
        command = json.loads(line)
        if "prefill" in command:
            answer = producer.prefill(command["prefill"])
        elif "held" in command:
            answer = {"held": producer.held()}
        elif "pages" in command:
            answer = producer.pages()
        else:
            answer = {"leaked": producer.leaked()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes where logs go
    serve(Producer(Path(sys.argv[1]), json.loads(sys.argv[2])), answers)


if __name__ == "__main__":
    main()
