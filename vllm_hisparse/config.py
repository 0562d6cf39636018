"""The plugin's options. Every error that a user can cause is raised here or in `validate`, as a ValueError of the form
"got X; need Y because Z". Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CONNECTOR = "HiSparseConnector"
MULTI_CONNECTOR = "MultiConnector"
POLICIES = ("lru", "lrfu")
DEFAULT_POLICY = "lrfu"
DEFAULT_HOT_FACTOR = 4  # cap of an elastic hot region, in multiples of top_k
MAX_HOT_ROWS = 1 << 15  # slots are int16
GIB = 1 << 30
MIB = 1 << 20

# key of kv_connector_extra_config -> (type, default); None: required or derived
_OPTIONS: dict[str, tuple[type, Any]] = {
    "host_pool_gib": (float, None),
    "low_watermark": (float, 0.08),
    "high_watermark": (float, 0.20),
    "max_hot_rows": (int, None),
    "policy": (str, DEFAULT_POLICY),
    "prefetch": (bool, True),
    "skip_io": (bool, False),
    "prefill_staging_mib": (int, 256),
    "max_indexer_pages": (int, 16),
    "check": (bool, False),
}
# Keys that vLLM itself puts into, or reads from, a connector's extra config.
_FOREIGN_KEYS = frozenset({"engine_id"})


@dataclass(frozen=True)
class HiSparseConfig:
    """Resolved options of one engine. Rows are per request and per layer; watermarks are fractions of the device pool.

    Frozen and picklable: the scheduler and every worker derive the same values from it.
    """

    host_pool_gib: float
    top_k: int
    verify_rows: int  # query rows a request may select for in one decode step: 1 + speculative tokens
    start_hot_rows: int  # slots of a region when it is granted (vLLM calls it device_buffer_size, the papers B)
    max_hot_rows: int  # slots that an elastic region may grow to
    low_watermark: float = 0.08  # fewer free blocks than this share: spill
    high_watermark: float = 0.20  # more free blocks than this share: restore, grow hot regions
    policy: str = DEFAULT_POLICY
    prefetch: bool = True
    skip_io: bool = False  # no-IO oracle: outputs are wrong, only for measuring
    prefill_staging_mib: int = 256
    max_indexer_pages: int = 16  # most pages an indexer block may hold; prefix hits come in whole indexer blocks
    eager_host_mirror: bool = True  # True: a page is copied to the host when it seals; False: when it spills
    check: bool = False  # integrity checks after every step

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
        options = read_options(connector_entry(vllm_config).get("kv_connector_extra_config") or {})
        top_k = _model_top_k(vllm_config)
        verify_rows = 1 + _num_speculative_tokens(vllm_config)
        tuning = vllm_config.attention_config.hisparse_config
        start, cap = _hot_rows(
            getattr(tuning, "device_buffer_size", None), options.pop("max_hot_rows"), top_k, verify_rows
        )
        return cls(
            **options,
            top_k=top_k,
            verify_rows=verify_rows,
            start_hot_rows=start,
            max_hot_rows=cap,
            eager_host_mirror=bool(getattr(tuning, "eager_host_mirror", True)),
        )


def connector_entries(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every connector configuration in `entry`, outermost first, through nested MultiConnectors."""
    yield entry
    if entry.get("kv_connector") == MULTI_CONNECTOR:
        for child in (entry.get("kv_connector_extra_config") or {}).get("connectors", ()):
            yield from connector_entries(child)


def connector_entry(vllm_config: Any) -> Mapping[str, Any]:
    """The one configuration of HiSparseConnector, wherever it is nested. Raises ValueError if there is not exactly one."""
    transfer = vllm_config.kv_transfer_config
    found = []
    if transfer is not None:
        outer = {
            "kv_connector": transfer.kv_connector,
            "kv_role": transfer.kv_role,
            "kv_connector_extra_config": transfer.kv_connector_extra_config,
        }
        found = [entry for entry in connector_entries(outer) if entry.get("kv_connector") == CONNECTOR]
    if len(found) != 1:
        raise ValueError(
            f"got {len(found)} {CONNECTOR} entries in --kv-transfer-config; need exactly one, on its own or inside "
            f"{MULTI_CONNECTOR}, because an engine has one host pool"
        )
    return found[0]


def read_options(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Typed options with defaults filled in. Raises ValueError for unknown keys, wrong types and impossible values."""
    unknown = sorted(set(extra) - set(_OPTIONS) - _FOREIGN_KEYS)
    if unknown:
        raise ValueError(
            f"got unknown options {unknown} for {CONNECTOR}; need keys among {sorted(_OPTIONS)} because a misspelt "
            "option would be ignored silently"
        )
    options = {
        key: default if extra.get(key) is None else _typed(key, extra[key], kind)
        for key, (kind, default) in _OPTIONS.items()
    }
    _check_options(options)
    return options


def _typed(key: str, value: Any, kind: type) -> Any:
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(
            f"got {key}={value!r} ({type(value).__name__}); need {kind.__name__} because {CONNECTOR} does not guess"
        )
    return kind(value)


def _check_options(options: Mapping[str, Any]) -> None:
    if options["host_pool_gib"] is None:
        raise ValueError(
            f"got no host_pool_gib for {CONNECTOR}; need the size of the pinned host pool in GiB because the full KV "
            'lives there: "kv_connector_extra_config": {"host_pool_gib": 384}'
        )
    if not 0 < options["host_pool_gib"] < float("inf"):
        raise ValueError(
            f"got host_pool_gib={options['host_pool_gib']:g}; need a finite size above 0 GiB because the full KV lives "
            "in the host pool"
        )
    low, high = options["low_watermark"], options["high_watermark"]
    if not 0 <= low < high <= 1:
        raise ValueError(
            f"got low_watermark={low:g}, high_watermark={high:g}; need 0 <= low < high <= 1 because they are shares of "
            "the device pool's blocks and spilling has to stop above where it starts"
        )
    if options["policy"] not in POLICIES:
        raise ValueError(f"got policy={options['policy']!r}; need one of {list(POLICIES)} because no other is built in")
    for key in ("prefill_staging_mib", "max_indexer_pages"):
        if options[key] < 1:
            raise ValueError(f"got {key}={options[key]}; need at least 1 because nothing could be placed otherwise")


def _hot_rows(size: int | None, cap: int | None, top_k: int, verify_rows: int) -> tuple[int, int]:
    """(start, cap) of a hot region in rows. Without any option a region starts at the floor plus one top-k of slack."""
    floor = verify_rows * top_k
    start = size if size is not None else min(floor + top_k, MAX_HOT_ROWS if cap is None else cap)
    if cap is None:
        cap = size if size is not None else min(max(DEFAULT_HOT_FACTOR * top_k, start), MAX_HOT_ROWS)
    name = "device_buffer_size" if size is not None else "max_hot_rows"
    if start < floor:
        raise ValueError(
            f"got {name}={start}; need at least {floor} because a step may select {verify_rows} rows x top-k {top_k} "
            "and every selected row has to be in the hot region at once"
        )
    if cap < start:
        raise ValueError(
            f"got max_hot_rows={cap} with device_buffer_size={start}; need max_hot_rows >= device_buffer_size because "
            "a hot region starts at device_buffer_size rows and grows up to max_hot_rows"
        )
    if cap > MAX_HOT_ROWS:
        name = "max_hot_rows" if cap != size else "device_buffer_size"
        raise ValueError(f"got {name}={cap}; need at most {MAX_HOT_ROWS} because slots are stored as int16")
    return start, cap


def _model_top_k(vllm_config: Any) -> int:
    hf_config = vllm_config.model_config.hf_config
    text_config = getattr(vllm_config.model_config, "hf_text_config", None)
    top_k = getattr(hf_config, "index_topk", None) or getattr(text_config, "index_topk", None)
    if not top_k:
        raise ValueError(
            f"got a {getattr(hf_config, 'model_type', 'model')} model without index_topk; need a DSA model (top-k "
            "sparse attention) because only the rows that an indexer selects are read"
        )
    return int(top_k)


def _num_speculative_tokens(vllm_config: Any) -> int:
    speculative = getattr(vllm_config, "speculative_config", None)
    return int(getattr(speculative, "num_speculative_tokens", None) or 0)
