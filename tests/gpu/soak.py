"""Many random steps a configuration, configurations in parallel: python -m tests.gpu.soak --steps 10000
--out soak.json"""

import argparse
import json
import time
import traceback
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.gpu.scenario import SHAPES, Scenario
from vllm_hisparse.ops import load_library


def soak(job: tuple[int, int, float]) -> dict[str, object]:
    index, steps, seconds = job
    torch.set_num_threads(1)
    load_library("cpu")
    load_library("cuda")
    shape = SHAPES[index]
    scenario = Scenario(shape, seed=1000 + index)
    begin = time.monotonic()
    error = None
    try:
        while scenario.steps < steps and time.monotonic() - begin < seconds:
            scenario.step(compare_pool=scenario.steps % 16 == 0)
        scenario.compare(("pool",))
    except Exception:
        error = traceback.format_exc()[-1500:]
    names = ("hits", "misses", "resident", "overflow", "unreadable")
    counters = dict(zip(names, scenario.cpu["counters"].tolist(), strict=False))
    seconds = round(time.monotonic() - begin, 1)
    return {"shape": shape.name, "steps": scenario.steps, "equal": error is None, "error": error,
            "seconds": seconds, **counters}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=240.0, help="limit for one configuration")
    parser.add_argument("--processes", type=int, default=len(SHAPES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to record")
    args = parser.parse_args()
    jobs = [(index, args.steps, args.seconds) for index in range(len(SHAPES))]
    with get_context("spawn").Pool(args.processes) as pool:
        results = pool.map(soak, jobs[::-1], chunksize=1)[::-1]
    for result in results:
        print({name: value for name, value in result.items() if name != "error"})
        if result["error"]:
            print(result["error"])
    if args.out:
        args.out.write_text(
            json.dumps(
                {"gpu": torch.cuda.get_device_name(), "commit": args.commit, "results": results}, indent=1
            )
            + "\n"
        )
    if not all(result["equal"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
