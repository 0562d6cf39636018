"""What `vllm-hisparse plan` prints: a report as plain data, the line to serve, and both as text."""

from __future__ import annotations

import json
import shlex
from fractions import Fraction
from math import ceil
from typing import Any

from vllm_hisparse.config import CONNECTOR, GIB
from vllm_hisparse.planning.bounds import Concurrency
from vllm_hisparse.planning.estimate import Estimate
from vllm_hisparse.planning.machines import GPU_UTILIZATION
from vllm_hisparse.planning.report import ADVICE
from vllm_hisparse.planning.sizes import host_block_bytes, needed_host_blocks

__all__ = ["report", "serve_command", "text"]

VLLM_DTYPE = {"fp8": "fp8", "bf16": "bfloat16", "fp32": "auto"}
DIGITS = 4


def report(result: Estimate, tensor_parallel: int, gpu: str | None, utilization: float) -> dict[str, Any]:
    """Everything about a plan as JSON values. GiB of one GPU, or of the host pool that the GPUs share.

    `gpu`: the GPU that KV memory was estimated from, None if it was given.
    """
    setup, need, plan = result.setup, result.need, result.plan
    pool_gib = result.host_pool_bytes / GIB
    given = result.host_budget_bytes
    return {
        "model": setup.model.name,
        "context": setup.context,
        "tensor_parallel": tensor_parallel,
        "speculative_tokens": setup.speculative_tokens,
        "kv_dtype": setup.kv_dtype,
        "row_bytes": plan.row_bytes,
        "max_num_seqs": setup.max_requests,
        "gpu": gpu,
        "kv_gib": round(setup.kv_bytes / GIB, DIGITS),
        "block_bytes": plan.block_stride_bytes,
        "num_parts": plan.num_parts,
        "indexer_pages": plan.indexer_pages,
        "num_device_blocks": result.num_device_blocks,
        "num_host_blocks": result.num_host_blocks,
        "num_regions": result.num_regions,
        "host_pool_gib": given / GIB,
        "used_host_gib": round(pool_gib, DIGITS),
        "needed_host_pool_gib": round(result.needed_host_pool_bytes / GIB, DIGITS),
        "admission_blocks": need.admission_blocks,
        "steady_blocks": need.steady_blocks(need.start_hot_blocks),
        "floor_blocks": need.steady_blocks(need.floor_hot_blocks),
        "start_hot_rows": need.start_hot_blocks * plan.page_tokens,
        "floor_hot_rows": need.floor_hot_blocks * plan.page_tokens,
        "plain": _bound(result.plain),
        "admission": _bound(result.admission),
        "steady": _bound(result.steady),
        "floor": _bound(result.floor),
        "gain": round(float(result.steady.value / result.plain.value), DIGITS)
        if result.plain.value
        else None,
        "starts": result.starts,
        "advice": advice(result),
        "serve": serve_command(result, tensor_parallel, gpu, utilization),
    }


def advice(result: Estimate) -> str:
    """What to change, in one sentence."""
    if result.need.admission_blocks > result.num_device_blocks - 1:
        return f"does not start: a request needs more device blocks than there are; {ADVICE['device']}"
    if not result.starts:
        least = ceil(100 * needed_host_blocks(result.need) * host_block_bytes(result.plan) / GIB) / 100
        return f"does not start: all pages of a request are on the host; raise host_pool_gib to {least:.2f}"
    if result.steady.value <= result.plain.value:
        return "leave HiSparse off: plain vLLM holds as many requests of this length on the device"
    return f"limited by {result.steady.limit}: {ADVICE[result.steady.limit]}"


def serve_command(result: Estimate, tensor_parallel: int, gpu: str | None, utilization: float) -> str:
    """The `vllm serve` line of the plan, quoted for a shell."""
    setup = result.setup
    words = ["vllm", "serve", setup.model.checkpoint]
    if tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(tensor_parallel)]
    words += [
        *("--max-model-len", str(setup.context)),
        *("--max-num-seqs", str(setup.max_requests)),
        *("--max-num-batched-tokens", str(setup.step_tokens)),
        *("--kv-cache-dtype", VLLM_DTYPE[setup.kv_dtype]),
    ]
    if gpu is not None and utilization != GPU_UTILIZATION:
        words += ["--gpu-memory-utilization", f"{utilization:g}"]
    if setup.steps_in_flight == 1:
        words += ["--no-async-scheduling"]
    if setup.speculative_tokens:
        speculative = {"method": "mtp", "num_speculative_tokens": setup.speculative_tokens}
        words += ["--speculative-config", _compact(speculative)]
    if setup.start_hot_rows is not None:
        tuning = {"hisparse_config": {"device_buffer_size": setup.start_hot_rows}}
        words += ["--attention-config", _compact(tuning)]
    extra = {"host_pool_gib": _number(result.host_budget_bytes / GIB), **setup.options}
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return shlex.join([*words, "--kv-transfer-config", _compact(transfer)])


def text(content: dict[str, Any]) -> str:
    """The report for people."""
    plain, admission, steady, floor = (content[key] for key in ("plain", "admission", "steady", "floor"))
    source = f"estimated for {content['gpu']}; vLLM logs the true figure" if content["gpu"] else "as given"
    start = content["start_hot_rows"]
    shared = ", one for all GPUs of a node" if content["tensor_parallel"] > 1 else ""
    gain = f", {content['gain']:.1f} times as many" if content["gain"] else ""
    lines = [
        _headline(content),
        "",
        f"  plain vLLM          {plain['value']:9,.2f} at a time, limited by {plain['limit']}",
        f"  HiSparse decoding   {steady['value']:9,.2f} with hot regions of {start:,} rows{gain}",
        f"                      {floor['value']:9,.2f} with the smallest, {content['floor_hot_rows']:,} rows",
        f"           admitting  {admission['value']:9,.2f} at once",
        "",
        f"  {content['advice']}",
        "",
        f"  KV memory   {content['kv_gib']:,.1f} GiB a GPU, {source}",
        f"  device pool {content['num_device_blocks']:,} blocks of {content['block_bytes']:,} bytes, "
        f"{content['num_regions']} hot regions",
        f"  host pool   {content['host_pool_gib']:,g} GiB{shared}; "
        f"with {content['needed_host_pool_gib']:,.1f} it is no limit",
        "",
        content["serve"],
    ]
    return "\n".join(lines)


def _headline(content: dict[str, Any]) -> str:
    ranks, drafts = content["tensor_parallel"], content["speculative_tokens"]
    return (
        f"{content['model']}: requests of {content['context']:,} tokens, {content['kv_dtype']} KV "
        f"({content['row_bytes']} bytes a row), {ranks} GPU{'s' if ranks > 1 else ''}"
        + (f", {drafts} speculative tokens" if drafts else "")
    )


def _bound(bound: Concurrency) -> dict[str, Any]:
    def plain(value: Fraction) -> float:
        return round(float(value), DIGITS)

    return {
        "value": plain(bound.value),
        "limit": bound.limit,
        "device": plain(bound.device),
        "host": plain(bound.host),
        "regions": bound.num_regions,
        "max_num_seqs": bound.max_requests,
    }


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else round(value, 6)
