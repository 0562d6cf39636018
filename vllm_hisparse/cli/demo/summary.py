"""The verdict: outputs compared bit by bit, figures as a table and as JSON. Everything is measured."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from vllm_hisparse.cli.demo.frames import Finished, Mode, Output
from vllm_hisparse.cli.demo.progress import Progress, RunProgress

__all__ = ["first_difference", "report", "table"]


def first_difference(outputs: Mapping[str, Output], reference: Mapping[str, Output]) -> str | None:
    """Where two runs' tokens or log-probabilities differ first, in words; None if they are the same bits."""
    if outputs.keys() != reference.keys():
        return f"requests {sorted(outputs)} instead of {sorted(reference)}"
    for name, expected in reference.items():
        got = outputs[name]
        if len(got.token_ids) != len(expected.token_ids) or len(got.logprobs) != len(expected.logprobs):
            return f"request {name} has {len(got.token_ids)} tokens instead of {len(expected.token_ids)}"
        for i, (token, token_expected) in enumerate(zip(got.token_ids, expected.token_ids, strict=True)):
            if token != token_expected:
                return f"request {name}, new token {i}: {token} instead of {token_expected}"
            if got.logprobs[i] != expected.logprobs[i]:
                return f"request {name}, log-probabilities of new token {i}"
    return None


def report(progress: Progress) -> dict[str, Any]:
    """The JSON object of `--json`. Every run has finished."""
    plain, hisparse, reference = (progress.runs[mode] for mode in Mode)
    assert hisparse.latest is not None and reference.started is not None
    expected = _finished(reference).outputs
    difference = first_difference(_finished(hisparse).outputs, expected)
    return {
        "identical": difference is None,
        "difference": difference,
        "identical_plain": first_difference(_finished(plain).outputs, expected) is None,
        "spilled_pages": hisparse.latest.spilled_pages,
        "max_host_only_pages": hisparse.max_host_only,
        "host_rows_read": hisparse.latest.host_rows_read,
        "hits": hisparse.latest.hits,
        "misses": hisparse.latest.misses,
        "hit_rate": round(hisparse.hit_rate, 4),
        **{f"preemptions_{mode.value}": run.num_preemptions for mode, run in progress.runs.items()},
        **{f"mean_decoding_{mode.value}": round(run.mean_decoding, 4) for mode, run in progress.runs.items()},
        **{f"steps_{mode.value}": run.num_steps for mode, run in progress.runs.items()},
        "pools": {mode.value: _pool(run) for mode, run in progress.runs.items()},
        "seconds": {mode.value: _seconds(run) for mode, run in progress.runs.items()},
        "versions": reference.started.versions,
    }


def table(figures: Mapping[str, Any]) -> Table:
    """Plain vLLM and HiSparse side by side."""
    result = Table(title="the same two requests, the same bytes of KV pool", title_justify="left")
    result.add_column("")
    for title in ("plain vLLM", "HiSparse", "full residency"):
        result.add_column(title, justify="right")
    pools = [figures["pools"][mode.value] for mode in Mode]
    result.add_row("KV pool", *(f"{p['blocks']} x {p['block_bytes']:,} B" for p in pools))
    result.add_row("", *(f"= {p['bytes'] / 1e6:.2f} MB" for p in pools))
    beside = f"{pools[1]['beside_bytes'] / 1e6:.2f} MB"
    result.add_row("staging and resolver state beside it", "-", beside, "-")
    result.add_row(
        "requests decoding per step, mean", *_of_modes(figures, "mean_decoding", "{:.2f}"), style="bold"
    )
    result.add_row("preemptions", *_of_modes(figures, "preemptions", "{}"), style="bold")
    result.add_row("engine steps until both were done", *_of_modes(figures, "steps", "{}"))
    host = pools[1]["host_blocks"]
    result.add_row("pages copied to the host pool", "-", f"{figures['spilled_pages']} (room for {host})", "-")
    result.add_row("most pages on the host only at a time", "-", str(figures["max_host_only_pages"]), "-")
    result.add_row("rows read back from the host", "-", f"{figures['host_rows_read']:,}", "-")
    result.add_row("hit rate of the hot regions (random weights)", "-", f"{figures['hit_rate']:.0%}", "-")
    identical = ["yes" if figures[key] else "NO" for key in ("identical_plain", "identical")]
    result.add_row("outputs identical to full residency", *identical, "reference")
    return result


def _of_modes(figures: Mapping[str, Any], key: str, form: str) -> list[str]:
    return [form.format(figures[f"{key}_{mode.value}"]) for mode in Mode]


def _finished(run: RunProgress) -> Finished:
    assert run.finished is not None, f"{run.title} has not finished"
    return run.finished


def _pool(run: RunProgress) -> dict[str, int]:
    assert run.started is not None
    pool = run.started.pool
    sizes = {"blocks": pool.num_blocks, "block_bytes": pool.block_bytes, "bytes": pool.num_bytes}
    if not pool.num_host_blocks:
        return sizes
    return sizes | {
        "beside_bytes": pool.beside_bytes,
        "host_blocks": pool.num_host_blocks,
        "host_block_bytes": pool.host_block_bytes,
    }


def _seconds(run: RunProgress) -> dict[str, float]:
    assert run.started is not None
    return {"start": round(run.started.seconds, 2), "run": round(_finished(run).seconds, 2)}
