"""KV cache groups: source (host), indexer, and one resident group a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.kv_cache_interface import (
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from vllm_hisparse.config import HiSparseConfig, user_error

from .geometry import Shape, choose_geometry
from .layout import LayerPlan, index_groups
from .specs import SOURCE_ROLE, IndexerSpec, ResidentSpec, resident_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MlaSpecs = dict[str, MLAAttentionSpec]


def kv_cache_groups(
    vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
) -> list[KVCacheGroupSpec] | None:
    """Groups in a fixed order: source, indexer, resident parts. None without HiSparse or without MLA layers.

    Called several times, also with its own output in `kv_cache_spec`: a plan that is there is used again.
    Raises ValueError if the layers cannot be served.
    """
    if vllm_config.attention_config.hisparse_config is None:
        return None
    if not any(isinstance(spec, MLAAttentionSpec) for spec in kv_cache_spec.values()):
        return None
    source, indexer = _partition(kv_cache_spec)
    plan = _existing_plan(kv_cache_spec.values())
    if plan is None:
        plan = make_plan(source, indexer, HiSparseConfig.from_vllm_config(vllm_config).max_indexer_pages)
    source = {name: replace(spec, block_stride_alignment=None) for name, spec in source.items()}
    indexer = {name: _indexer_spec(spec, plan) for name, spec in indexer.items()}
    return [
        KVCacheGroupSpec(list(source), _uniform(source), host_resident=True, role=cast(Any, SOURCE_ROLE)),
        KVCacheGroupSpec(list(indexer), _uniform(indexer), role=KVCacheGroupRole.HISPARSE_INDEXER),
        *(
            KVCacheGroupSpec(
                [resident_name(name) for name in names], _resident_spec(plan, part), enable_kv_transfer=False
            )
            for part, names in enumerate(plan.parts)
        ),
    ]


def resolve_specs(
    vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec], attn_layers: Mapping[str, Any]
) -> dict[str, KVCacheSpec]:
    """The worker's specs: layers in blocks that every backend takes, and one for each pseudo layer."""
    mla: MlaSpecs = {name: spec for name, spec in kv_cache_spec.items() if isinstance(spec, MLAAttentionSpec)}
    if not mla:
        return kv_cache_spec
    page_tokens = _page_tokens(mla, attn_layers)
    at_page = kv_cache_spec | {name: spec.copy_with_new_block_size(page_tokens) for name, spec in mla.items()}
    groups = kv_cache_groups(vllm_config, at_page)
    assert groups is not None
    return at_page | {name: _layer_spec(group, name) for group in groups for name in group.layer_names}


def make_plan(source: Mapping[str, Any], indexer: Mapping[str, Any], max_indexer_pages: int) -> LayerPlan:
    """Places the layers of `source` and `indexer` (layer name -> spec with one page a block) in blocks."""
    page_tokens = _one({spec.block_size for spec in (*source.values(), *indexer.values())}, "block size")
    row_page = _one({spec.page_size_bytes for spec in source.values()}, "KV page size")
    key_page = _one({spec.page_size_bytes for spec in indexer.values()}, "indexer page size")
    shape = Shape(
        num_layers=len(source),
        num_indexer_layers=len(indexer),
        row_bytes=row_page // page_tokens,
        indexer_row_bytes=key_page // page_tokens,
        page_tokens=page_tokens,
    )
    return LayerPlan(
        geometry=choose_geometry(shape, max_indexer_pages),
        layers=tuple(source),
        index_groups=index_groups({name: spec.is_index_group_leader for name, spec in source.items()}),
        indexer_layers=tuple(indexer),
    )


def _partition(kv_cache_spec: Mapping[str, KVCacheSpec]) -> tuple[MlaSpecs, MlaSpecs]:
    """(layers with KV rows, layers with indexer keys). Raises ValueError if other layers need KV too."""
    source: MlaSpecs = {}
    indexer: MlaSpecs = {}
    others = []
    for name, spec in kv_cache_spec.items():
        if isinstance(spec, ResidentSpec):
            continue
        if not isinstance(spec, MLAAttentionSpec) or spec.model_version is not None:
            others.append(name)
        elif spec.cache_role is SparseCacheRole.INDEXER:
            indexer[name] = spec
        else:
            source[name] = spec
    if others or not source or not indexer:
        raise user_error(
            got=f"{len(source)} sparse MLA layers, {len(indexer)} indexers, {len(others)} more {others[:3]}",
            need="sparse MLA layers and their indexers only",
            because="every layer's rows leave the device page by page",
        )
    return source, indexer


def _existing_plan(specs: Iterable[KVCacheSpec]) -> LayerPlan | None:
    return next((spec.plan for spec in specs if isinstance(spec, ResidentSpec)), None)


def _indexer_spec(spec: MLAAttentionSpec, plan: LayerPlan) -> MLAAttentionSpec:
    if plan.indexer_pages == 1:
        return replace(spec, block_stride_alignment=None)
    kept = {f.name: getattr(spec, f.name) for f in fields(spec) if f.init}
    kept |= {
        "block_size": plan.page_tokens * plan.indexer_pages,
        "block_stride_alignment": None,
        "share_bytes": plan.indexer_share_bytes,
    }
    return IndexerSpec(**kept)


def _resident_spec(plan: LayerPlan, part: int) -> ResidentSpec:
    stride = plan.block_stride_bytes
    return ResidentSpec(block_size=plan.page_tokens, plan=plan, part=part, block_stride_alignment=stride)


def _uniform(specs: MlaSpecs) -> UniformTypeKVCacheSpecs:
    uniform = UniformTypeKVCacheSpecs.from_specs(dict(specs))
    assert uniform is not None, sorted({spec.block_size for spec in specs.values()})
    return uniform


def _layer_spec(group: KVCacheGroupSpec, name: str) -> KVCacheSpec:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _page_tokens(mla: MlaSpecs, attn_layers: Mapping[str, Any]) -> int:
    from vllm.v1.worker.utils import select_common_block_size

    block_size = _one({spec.block_size for spec in mla.values()}, "block size")
    backends = [attn_layers[name].get_attn_backend() for name in mla]
    try:
        return int(select_common_block_size(block_size, backends, list(mla.values())))
    except ValueError as error:
        raise user_error(
            got=f"--block-size {block_size}",
            need="one that every sparse attention and indexer backend takes",
            because=f"a page is one kernel block: {error}",
        ) from error


def _one(values: set[int], what: str) -> int:
    if len(values) != 1:
        raise user_error(got=f"{what}s {sorted(values)}", need="one", because="a page spans all layers")
    return values.pop()
