"""`vllm-hisparse plan`: how many requests a server holds, what limits it, and the command that starts it.

Needs neither vLLM nor torch.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from vllm_hisparse.cli.plan_report import report, text
from vllm_hisparse.config import GIB, user_error
from vllm_hisparse.planning.estimate import (
    KV_DTYPES,
    MAX_NUM_SEQS,
    STEP_TOKENS,
    STEPS_IN_FLIGHT,
    Setup,
    estimate,
)
from vllm_hisparse.planning.machines import GPU_MEMORY_MIB, GPU_UTILIZATION, kv_memory_bytes
from vllm_hisparse.planning.models import BUILT_IN, Model, load_model

__all__ = ["plan"]

DEFAULT_CONTEXT = 131072

ModelName = Annotated[
    str, typer.Argument(help=f"A config.json, its directory, or {' or '.join(BUILT_IN)}.", metavar="MODEL")
]
Gpu = Annotated[
    str | None, typer.Option(help=f"{', '.join(GPU_MEMORY_MIB)}; KV memory is estimated from it.")
]
KvGib = Annotated[
    float | None, typer.Option(help="KV memory of one GPU: 'Available KV cache memory' in vLLM's log.")
]
Context = Annotated[int | None, typer.Option(help="Longest request in tokens: --max-model-len.")]
HostPoolGib = Annotated[
    float | None,
    typer.Option(help="Host memory to pin on a node, one pool for all its GPUs, as the connector takes it."),
]
MaxSeqs = Annotated[int, typer.Option(help="Requests that vLLM runs at a time.")]
StepTokens = Annotated[int, typer.Option(help="Tokens of a step.")]
BufferSize = Annotated[int | None, typer.Option(help="Rows of a hot region when it is granted.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option", help="A connector option as KEY=JSON, such as max_hot_rows=4096.", metavar="KEY=JSON"
    ),
]


def plan(
    model: ModelName,
    gpu: Gpu = None,
    kv_gib: KvGib = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel GPUs.", min=1)] = 1,
    context: Context = None,
    mtp: Annotated[int, typer.Option(help="Speculative tokens of the model's MTP layer.")] = 0,
    kv_dtype: Annotated[str, typer.Option(help=f"Of KV rows: {', '.join(KV_DTYPES)}.")] = "fp8",
    host_pool_gib: HostPoolGib = None,
    max_num_seqs: MaxSeqs = MAX_NUM_SEQS,
    max_num_batched_tokens: StepTokens = STEP_TOKENS,
    device_buffer_size: BufferSize = None,
    options: Options = None,
    no_async_scheduling: Annotated[bool, typer.Option("--no-async-scheduling")] = False,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="With --gpu.", min=0, max=1)
    ] = GPU_UTILIZATION,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """How many requests plain vLLM and HiSparse hold, the host pool that takes, and the line to serve."""
    try:
        shape = load_model(model)
        setup = Setup(
            model=shape,
            kv_bytes=_kv_bytes(shape, gpu, kv_gib, tp, mtp, gpu_memory_utilization),
            context=context
            if context is not None
            else min(DEFAULT_CONTEXT, shape.max_context or DEFAULT_CONTEXT),
            host_pool_bytes=_host_pool_bytes(host_pool_gib),
            speculative_tokens=mtp,
            kv_dtype=kv_dtype,
            max_requests=max_num_seqs,
            step_tokens=max_num_batched_tokens,
            steps_in_flight=1 if no_async_scheduling else STEPS_IN_FLIGHT,
            start_hot_rows=device_buffer_size,
            options=_parse(options or []),
        )
        content = report(estimate(setup), tp, gpu if kv_gib is None else None, gpu_memory_utilization)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(json.dumps(content, indent=1) if as_json else text(content))


def _kv_bytes(
    model: Model, gpu: str | None, kv_gib: float | None, tp: int, mtp: int, utilization: float
) -> int:
    if kv_gib is not None:
        if not 0 < kv_gib < float("inf"):
            raise user_error(
                got=f"--kv-gib {kv_gib:g}", need="a finite size above 0", because="KV needs memory"
            )
        return int(kv_gib * GIB)
    if gpu is None or gpu.lower() not in GPU_MEMORY_MIB:
        raise user_error(
            got="neither --gpu nor --kv-gib" if gpu is None else f"--gpu {gpu}",
            need=f"--kv-gib, or --gpu with one of {', '.join(GPU_MEMORY_MIB)}",
            because="concurrency follows from the KV memory of a GPU",
        )
    left = kv_memory_bytes(model, gpu.lower(), tp, mtp, utilization)
    if left <= 0:
        raise user_error(
            got=f"{tp} x {gpu}, {-left / GIB:.1f} GiB too small for {model.name} and working memory",
            need="more --tp, larger GPUs, or the measured --kv-gib",
            because="KV takes what weights leave",
        )
    return left


def _host_pool_bytes(given: float | None) -> int | None:
    if given is None:
        return None
    if not 0 < given < float("inf"):
        raise user_error(
            got=f"{given:g} GiB of host memory", need="a finite size above 0", because="KV lives there"
        )
    return int(given * GIB)


def _parse(options: list[str]) -> dict[str, Any]:
    parsed = {}
    for option in options:
        key, separator, value = option.partition("=")
        try:
            parsed[key] = json.loads(value if separator else "")
        except ValueError as error:
            raise user_error(
                got=f"--option {option}", need="KEY=JSON, such as max_hot_rows=4096", because=str(error)
            ) from error
    if "host_pool_gib" in parsed:
        raise user_error(
            got="--option host_pool_gib", need="--host-pool-gib", because="there is one way to say it"
        )
    return parsed
