"""The plugin's options, typed and checked.

Every error that a user can cause is a ValueError of the form "got X; need Y because Z" (`user_error`).
Imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CONNECTOR = "HiSparseConnector"
MULTI_CONNECTOR = "MultiConnector"
NIXL_CONNECTOR = "HiSparseNixlConnector"
POLICIES = ("lru", "lrfu")
DEFAULT_POLICY = "lrfu"
DEFAULT_HOT_FACTOR = 4  # cap of an elastic hot region, in multiples of top_k
MAX_HOT_ROWS = 1 << 15  # slots are int16
MAX_INDEXER_PAGES = 16
MAX_GIB_BY_LAYER = 1024  # of the host pool without prefetch: 2^31 rows of 512 bytes
# Connectors that go with indexer blocks of several pages: others move a layer's page of a kernel block.
BLOCKWISE_CONNECTORS = frozenset({CONNECTOR, MULTI_CONNECTOR, "OffloadingConnector"})
GIB = 1 << 30
MIB = 1 << 20

# key of kv_connector_extra_config -> (type, default); None: required or derived
_OPTIONS: dict[str, tuple[type, Any]] = {
    "host_pool_gib": (float, None),
    "low_watermark": (float, 0.08),
    "high_watermark": (float, 0.20),
    "prefix_share": (float, 0.5),
    "max_passing": (int, 16),
    "max_hot_rows": (int, None),
    "policy": (str, DEFAULT_POLICY),
    "prefetch": (bool, True),
    "skip_io": (bool, False),
    "prefill_staging_mib": (int, 256),
    "max_indexer_pages": (int, None),
    "always_host": (bool, False),
    "trace_path": (str, None),
    "trace_max_mib": (int, 256),
}


def user_error(*, got: str, need: str, because: str) -> ValueError:
    """The one form of an error that a user can cause; to be raised by the caller."""
    return ValueError(f"got {got}; need {need} because {because}")


@dataclass(frozen=True)
class HiSparseConfig:
    """Resolved options of one engine, equal on the scheduler and every worker.

    Rows count per request and layer; watermarks are shares of the device pool's blocks.
    """

    host_pool_gib: float  # of a data-parallel replica on a node, whatever the number of its ranks
    top_k: int
    verify_rows: int  # query rows a request may select for in one decode step: 1 + speculative tokens
    start_hot_rows: int  # slots of a region when it is granted: vLLM's device_buffer_size, the papers' B
    max_hot_rows: int  # slots that an elastic region may grow to
    low_watermark: float = 0.08  # fewer free blocks than this share: spill
    high_watermark: float = 0.20  # more free blocks than this share: restore, grow hot regions
    prefix_share: float = 0.5  # at most this much of the pool keeps what ended requests have left there alone
    max_passing: int = 16  # requests that find their prefix may pass one whose prefill costs prefixes
    policy: str = DEFAULT_POLICY
    prefetch: bool = True  # a miss is read for all layers of its group at once; False: for each in turn
    skip_io: bool = False  # no-IO oracle: outputs are wrong, only for measuring
    prefill_staging_mib: int = 256
    max_indexer_pages: int = MAX_INDEXER_PAGES  # most pages of an indexer block: the grain of prefix hits
    eager_host_mirror: bool = True  # True: a page is copied to the host when it seals; False: when it spills
    always_host: bool = False  # decode from host and hot region although the device has room, to compare
    trace_path: str | None = None  # file that selections are recorded to; None: nothing is recorded
    trace_max_mib: int = 256  # host memory of a recording

    @property
    def floor_hot_rows(self) -> int:
        """Fewest slots that can serve a step: the union of every verify row's selection."""
        return self.verify_rows * self.top_k

    @property
    def host_pool_bytes(self) -> int:
        return int(self.host_pool_gib * GIB)

    @property
    def prefill_staging_bytes(self) -> int:
        return self.prefill_staging_mib * MIB

    def low_blocks(self, num_blocks: int) -> int:
        """Free-block level of a pool of `num_blocks` below which pages are spilled."""
        return int(self.low_watermark * num_blocks)

    def high_blocks(self, num_blocks: int) -> int:
        """Free-block level of a pool of `num_blocks` above which pages are restored and regions grow."""
        return int(self.high_watermark * num_blocks)

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> HiSparseConfig:
        """Reads the connector's options, vLLM's `hisparse_config` and the model's top-k.

        Raises ValueError for a missing, unknown, ill-typed or contradictory option.
        """
        entry = connector_entry(vllm_config)
        options = read_options(entry.get("kv_connector_extra_config") or {})
        options["max_indexer_pages"] = _max_indexer_pages(options["max_indexer_pages"], vllm_config)
        top_k = _model_top_k(vllm_config)
        verify_rows = 1 + _num_speculative_tokens(vllm_config)
        tuning = vllm_config.attention_config.hisparse_config
        size, cap = getattr(tuning, "device_buffer_size", None), options.pop("max_hot_rows")
        start, cap = _hot_rows(size, cap, top_k, verify_rows)
        return cls(
            **options,
            top_k=top_k,
            verify_rows=verify_rows,
            start_hot_rows=start,
            max_hot_rows=cap,
            eager_host_mirror=bool(getattr(tuning, "eager_host_mirror", True)),
        )


@dataclass(frozen=True)
class NixlOptions:
    """Options of HiSparseNixlConnector, on either side."""

    import_timeout_s: float = 60.0  # longest time in which an import makes no progress
    kv_lease_duration: int = (
        30  # seconds that a producer keeps pages nobody asks for; vLLM's option and default
    )


def nixl_options(extra: Mapping[str, Any]) -> NixlOptions:
    """Of its `kv_connector_extra_config`. Raises ValueError for unknown or impossible ones."""
    known = {"import_timeout_s": float, "kv_lease_duration": int}
    _refuse_unknown(extra, known, NIXL_CONNECTOR)
    options = NixlOptions(**{key: _typed(key, value, known[key]) for key, value in extra.items()})
    if options.import_timeout_s <= 0 or options.kv_lease_duration < 6:
        raise user_error(
            got=f"import_timeout_s={options.import_timeout_s:g} and "
            f"kv_lease_duration={options.kv_lease_duration}",
            need="import_timeout_s > 0 and kv_lease_duration >= 6",
            because="a lease is renewed six times in its duration, in whole seconds",
        )
    return options


def connector_entries(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every connector configuration in `entry`, outermost first, through nested MultiConnectors."""
    yield entry
    if entry.get("kv_connector") == MULTI_CONNECTOR:
        for child in (entry.get("kv_connector_extra_config") or {}).get("connectors", ()):
            yield from connector_entries(child)


def all_connectors(vllm_config: Any) -> list[Mapping[str, Any]]:
    """Every connector configuration of the engine, outermost first; empty without any."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    keys = ("kv_connector", "kv_role", "kv_connector_extra_config")
    return list(connector_entries({key: getattr(transfer, key) for key in keys}))


def connector_entry(vllm_config: Any) -> Mapping[str, Any]:
    """The configuration of HiSparseConnector, however nested.

    Raises ValueError unless there is just one, and before all others.
    """
    leaves = [entry for entry in all_connectors(vllm_config) if entry.get("kv_connector") != MULTI_CONNECTOR]
    found = [entry for entry in leaves if entry.get("kv_connector") == CONNECTOR]
    if len(found) != 1:
        raise user_error(
            got=f"{len(found)} {CONNECTOR} entries in --kv-transfer-config",
            need=f"exactly one, on its own or inside {MULTI_CONNECTOR},",
            because="an engine has one host pool",
        )
    if leaves[0] is not found[0]:
        raise user_error(
            got=f"{leaves[0].get('kv_connector')} before {CONNECTOR} in {MULTI_CONNECTOR}",
            need=f"{CONNECTOR} as the first",
            because="what others transfer in a step must come after what it does to their blocks",
        )
    return found[0]


def read_options(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Typed options with defaults. Raises ValueError for unknown keys, wrong types and impossible values."""
    _refuse_unknown(extra, _OPTIONS, CONNECTOR)
    options = {
        key: default if extra.get(key) is None else _typed(key, extra[key], kind)
        for key, (kind, default) in _OPTIONS.items()
    }
    _check_options(options)
    return options


def _refuse_unknown(extra: Mapping[str, Any], known: Mapping[str, Any], connector: str) -> None:
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise user_error(
            got=f"unknown options {unknown} for {connector}",
            need=f"keys among {sorted(known)}",
            because="a misspelt option would be ignored silently",
        )


def _typed(key: str, value: Any, kind: type) -> Any:
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise user_error(
            got=f"{key}={value!r} of type {type(value).__name__}",
            need=kind.__name__,
            because="options are taken as they are written",
        )
    return kind(value)


def _check_options(options: Mapping[str, Any]) -> None:
    if options["host_pool_gib"] is None:
        raise user_error(
            got=f"no host_pool_gib for {CONNECTOR}",
            need='its size, as in "kv_connector_extra_config": {"host_pool_gib": 384},',
            because="the full KV lives in a pinned host pool",
        )
    if not 0 < options["host_pool_gib"] < float("inf"):
        raise user_error(
            got=f"host_pool_gib={options['host_pool_gib']:g}",
            need="a finite size above 0 GiB",
            because="the full KV lives in the host pool",
        )
    low, high = options["low_watermark"], options["high_watermark"]
    if not 0 <= low < high <= 1:
        raise user_error(
            got=f"low_watermark={low:g}, high_watermark={high:g}",
            need="0 <= low < high <= 1",
            because="they are shares of the device pool, and restoring starts above where spilling starts",
        )
    if not 0 <= options["prefix_share"] < 1:
        raise user_error(
            got=f"prefix_share={options['prefix_share']:g}",
            need="0 <= prefix_share < 1",
            because="it is the part of the device pool that running requests leave to prefixes",
        )
    if not options["prefetch"] and options["host_pool_gib"] > MAX_GIB_BY_LAYER:
        raise user_error(
            got=f"prefetch=false with host_pool_gib={options['host_pool_gib']:g}",
            need=f"at most {MAX_GIB_BY_LAYER} GiB",
            because="single layers' rows are counted in 31 bits",
        )
    if options["max_passing"] < 0:
        raise user_error(
            got=f"max_passing={options['max_passing']}",
            need="0 or more",
            because="it is a number of requests; 0 serves them in the order they came",
        )
    if options["policy"] not in POLICIES:
        raise user_error(
            got=f"policy={options['policy']!r}",
            need=f"one of {list(POLICIES)}",
            because="no other is built in",
        )
    for key in ("prefill_staging_mib", "max_indexer_pages", "trace_max_mib"):
        if options[key] is not None and options[key] < 1:
            raise user_error(
                got=f"{key}={options[key]}", need="at least 1", because="it has to hold something"
            )


def _max_indexer_pages(wanted: int | None, vllm_config: Any) -> int:
    names = {str(entry.get("kv_connector")) for entry in all_connectors(vllm_config)}
    others = sorted(names - BLOCKWISE_CONNECTORS)
    if not others:
        return MAX_INDEXER_PAGES if wanted is None else wanted
    if wanted not in (None, 1):
        raise user_error(
            got=f"max_indexer_pages={wanted} with {', '.join(others)}",
            need="1",
            because="that connector moves indexer keys by kernel block",
        )
    return 1


def _hot_rows(size: int | None, cap: int | None, top_k: int, verify_rows: int) -> tuple[int, int]:
    """(start, cap) of a hot region in rows; by default it starts at the floor plus one top-k of slack."""
    floor = verify_rows * top_k
    if floor > MAX_HOT_ROWS:
        raise user_error(
            got=f"{verify_rows - 1} speculative tokens with top-k {top_k}",
            need=f"at most {MAX_HOT_ROWS // top_k - 1}",
            because=f"a step's selections have to fit a hot region of {MAX_HOT_ROWS} rows (slots are int16)",
        )
    for name, rows in (("device_buffer_size", size), ("max_hot_rows", cap)):
        if rows is not None and not floor <= rows <= MAX_HOT_ROWS:
            raise user_error(
                got=f"{name}={rows}",
                need=f"{floor} to {MAX_HOT_ROWS}",
                because=f"a step may select {verify_rows} x top-k {top_k} rows, in the region at once, and "
                "slots are int16",
            )
    start = size if size is not None else min(floor + top_k, MAX_HOT_ROWS if cap is None else cap)
    if cap is None:
        cap = start if size is not None else min(max(DEFAULT_HOT_FACTOR * top_k, start), MAX_HOT_ROWS)
    if cap < start:
        raise user_error(
            got=f"max_hot_rows={cap} with device_buffer_size={start}",
            need="max_hot_rows >= device_buffer_size",
            because="a hot region starts at device_buffer_size rows and grows up to max_hot_rows",
        )
    return start, cap


def _model_top_k(vllm_config: Any) -> int:
    model = vllm_config.model_config
    configs = (getattr(model, "hf_config", None), getattr(model, "hf_text_config", None))
    top_k = next((k for c in configs if (k := getattr(c, "index_topk", None))), None)
    if top_k is None:
        raise user_error(
            got=f"a {getattr(configs[0], 'model_type', 'model')} model without index_topk",
            need="a DSA model (top-k sparse attention)",
            because="only rows that an indexer selects are read back",
        )
    return int(top_k)


def _num_speculative_tokens(vllm_config: Any) -> int:
    speculative = getattr(vllm_config, "speculative_config", None)
    return int(getattr(speculative, "num_speculative_tokens", None) or 0)
