"""The table of the connector's options in docs/tuning.md."""

from vllm_hisparse import config

# What config.py has no room for. A missing or surplus key is an error.
MEANINGS = {
    "host_pool_gib": "Size in GiB of the pinned host pool, one for all ranks of a data-parallel replica on a "
    "node. Required. `vllm-hisparse plan` says how much is of use.",
    "low_watermark": "Share of free device blocks below which pages are given up.",
    "high_watermark": "Share of free device blocks below which sealed pages are copied to the host, and "
    "above which pages return and hot regions grow.",
    "prefix_share": "Share of the device pool, at most, that is kept for prefixes of ended requests: indexer "
    "keys, which the host does not have. Pages of running requests that the host has go first.",
    "max_passing": "Waiting requests that find their prefix and may pass one whose prefill would push kept "
    "prefixes out, for each such one that is admitted; 0: first come, first served. Without effect where "
    "`prefix_share` is 0 or another connector may have prefixes, too.",
    "max_hot_rows": "Slots that a hot region may grow to. By default four times top-k, or the size it "
    "starts with if that is more or is set by `device_buffer_size`.",
    "policy": f"Which slot gives way to a miss: {' or '.join(f'`{name}`' for name in config.POLICIES)}.",
    "prefetch": "Reads a miss for all layers that share a selection at once, in one piece. Off: every layer "
    "reads its own row when it is reached. Same outputs: for comparison.",
    "skip_io": "Reads nothing from the host. Outputs are wrong: only for measuring what reads cost.",
    "prefill_staging_mib": "Device memory in MiB that prefills over host-backed context are staged in; "
    "never more than a request has.",
    "max_indexer_pages": f"Most pages of an indexer block, which is the grain of prefix hits. By "
    f"default {config.MAX_INDEXER_PAGES}, and 1 beside connectors that move indexer keys by kernel block.",
    "always_host": "Decodes from the host and the hot region even while the device has room, as HiSparse is "
    "described in its paper. Exact but slower: for comparison.",
    "trace_path": "File that selections are recorded to, see [policy](policy.md). Nothing is recorded "
    "by default.",
    "trace_max_mib": "Host memory of a recording in MiB.",
}


def table() -> str:
    """Options in the order of config.py, with type, default and meaning."""
    options = config._OPTIONS
    if set(MEANINGS) != set(options):
        raise ValueError(f"got meanings of other options than config.py has: {set(MEANINGS) ^ set(options)}")
    lines = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for key, (kind, default) in options.items():
        shown = "" if default is None else f"`{str(default).lower() if kind is bool else default}`"
        lines.append(f"| `{key}` | {kind.__name__} | {shown} | {MEANINGS[key]} |")
    return "\n".join(lines)
