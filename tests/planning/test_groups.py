"""KV groups and specs: order, roles, idempotence, and what vLLM asks of the specs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)

from tests.planning.engines import PATTERNS, engine, indexer_name, layer_specs, multi, source_name
from vllm_hisparse.planning.groups import kv_cache_groups, resolve_specs
from vllm_hisparse.planning.specs import SOURCE_ROLE, IndexerSpec, ResidentSpec, resident_name
from vllm_hisparse.planning.specs import source_name as name_of_layer


def groups_of(specs: dict[str, KVCacheSpec], vllm_config: Any = None) -> list[KVCacheGroupSpec]:
    groups = kv_cache_groups(engine() if vllm_config is None else vllm_config, specs)
    assert groups is not None
    return groups


def backend(*sizes: Any) -> Any:
    """An attention layer whose backend takes kernel blocks of `sizes` tokens."""
    attention_backend = SimpleNamespace(
        get_supported_kernel_block_sizes=lambda spec=None: list(sizes), get_name=lambda: "STUB"
    )
    return SimpleNamespace(get_attn_backend=lambda: attention_backend)


def test_groups_of_glm_52() -> None:
    source, indexer, *resident = groups_of(layer_specs(PATTERNS["glm-5.2"]))
    assert source.layer_names == [source_name(layer) for layer in range(78)]
    assert (source.role, source.host_resident, source.enable_kv_transfer) == (SOURCE_ROLE, True, True)
    assert source.kv_cache_spec.block_size == 64
    assert source.kv_cache_spec.page_size_bytes == 78 * 64 * 656
    assert indexer.role is KVCacheGroupRole.HISPARSE_INDEXER
    assert (indexer.host_resident, indexer.enable_kv_transfer) == (False, True)
    assert indexer.kv_cache_spec.block_size == 192
    assert len(indexer.layer_names) == 21
    assert [len(group.layer_names) for group in resident] == [13] * 6
    names = [name for group in resident for name in group.layer_names]
    assert names == [resident_name(name) for name in source.layer_names]
    assert [name_of_layer(name) for name in names] == source.layer_names
    for part, group in enumerate(resident):
        spec = group.kv_cache_spec
        assert isinstance(spec, ResidentSpec)
        assert (spec.part, spec.block_size, spec.page_size_bytes) == (part, 64, 64 * 656)
        assert not (group.enable_kv_transfer or group.host_resident)
        assert not (spec.prefix_cacheable or spec.has_layer_views)
        assert spec.uses_slot_mapping
        assert spec.get_block_stride_alignment() == spec.plan.block_stride_bytes == 547104


def test_indexer_layers_share_a_block() -> None:
    _, indexer, resident = groups_of(layer_specs(PATTERNS["glm-tiny"]))[:3]
    group_spec = indexer.kv_cache_spec
    assert isinstance(group_spec, UniformTypeKVCacheSpecs)
    specs = list(group_spec.kv_cache_specs.values())
    assert all(isinstance(spec, IndexerSpec) and spec == specs[0] for spec in specs)
    assert specs[0].block_size == 5 * 64
    plan = resident.kv_cache_spec.plan
    assert specs[0].page_size_bytes == specs[0].unpadded_page_size_bytes == plan.indexer_share_bytes
    assert group_spec.page_size_bytes <= plan.block_stride_bytes
    # the spec that a metadata builder gets
    assert specs[0].copy_with_new_block_size(64).block_size == 64


def test_indexer_blocks_of_one_page_keep_vllms_spec() -> None:
    vllm_config = engine(max_indexer_pages=1)
    specs = layer_specs(PATTERNS["glm-tiny"])
    _, indexer, *_ = groups_of(specs, vllm_config)
    assert indexer.kv_cache_spec.kv_cache_specs == {n: specs[n] for n in indexer.layer_names}


def test_beside_other_connectors_a_block_is_one_page() -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    child = {
        "kv_connector": "HiSparseConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_pool_gib": 1},
    }
    groups = groups_of(layer_specs(PATTERNS["glm-5.2"]), engine(multi(child, nixl)))
    assert {group.kv_cache_spec.block_size for group in groups} == {64}


@pytest.mark.parametrize("pattern", PATTERNS.values())
def test_idempotent(pattern: str) -> None:
    """Planning the output again, with the plan in it, gives the same groups and leaves the input alone."""
    vllm_config = engine()
    layers = {name: backend(64) for name in layer_specs(pattern)}
    specs = layer_specs(pattern, block_size=256)
    before = dict(specs)
    resolved = resolve_specs(vllm_config, specs, layers)
    assert specs == before
    groups = groups_of(resolved)
    assert groups == groups_of(resolved)
    assert set(resolved) == {name for group in groups for name in group.layer_names}
    for group in groups:
        for name in group.layer_names:
            spec = group.kv_cache_spec
            assert resolved[name] == (
                spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            )
    assert groups_of(layer_specs(pattern)) == groups


def test_a_plan_is_not_made_twice() -> None:
    """The engine core's options do not count once a worker has planned."""
    layers = {name: backend(64) for name in layer_specs("FFFF")}
    resolved = resolve_specs(engine(max_indexer_pages=1), layer_specs("FFFF"), layers)
    assert {g.kv_cache_spec.block_size for g in groups_of(resolved, engine(max_indexer_pages=16))} == {64}


def test_page_size_is_the_common_kernel_block() -> None:
    specs = layer_specs("FS", block_size=256)
    layers = {source_name(0): backend(MultipleOf(64)), source_name(1): backend(MultipleOf(64))}
    layers[indexer_name(0)] = backend(64)
    resolved = resolve_specs(engine(), specs, layers)
    assert resolved[source_name(0)].block_size == 64
    with pytest.raises(
        ValueError, match=r"^got --block-size 256; need one that every .* because a page is one"
    ):
        resolve_specs(engine(), specs, layers | {indexer_name(0): backend(48)})


def test_without_hisparse_nothing_is_planned() -> None:
    vllm_config = engine()
    vllm_config.attention_config.hisparse_config = None
    assert kv_cache_groups(vllm_config, layer_specs("FF")) is None


def test_without_mla_layers_nothing_is_planned() -> None:
    full = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    assert kv_cache_groups(engine(), {"a": full}) is None
    assert resolve_specs(engine(), {"a": full}, {}) == {"a": full}


def test_layers_that_cannot_be_served() -> None:
    specs = layer_specs("FS")
    full = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^got 2 sparse MLA layers, 1 indexers, 1 more \['draft'\]; need"):
        kv_cache_groups(engine(), specs | {"draft": full})
    with pytest.raises(ValueError, match=r"^got 2 sparse MLA layers, 0 indexers, 0 more"):
        kv_cache_groups(engine(), {n: s for n, s in specs.items() if n != indexer_name(0)})
    with pytest.raises(ValueError, match=r"^got 1 sparse MLA layers, 1 indexers, 1 more"):
        kv_cache_groups(
            engine(), specs | {source_name(1): replace(specs[source_name(1)], model_version="deepseek_v4")}
        )
    follower = replace(specs[source_name(0)], is_index_group_leader=False)
    with pytest.raises(
        ValueError, match=r"^got model.layers.0.* as the first sparse layer, without an indexer;"
    ):
        kv_cache_groups(engine(), specs | {source_name(0): follower})
    wide = replace(specs[source_name(1)], head_size=1152)
    with pytest.raises(ValueError, match=r"^got KV page sizes \[41984, 73728\]; need one because"):
        kv_cache_groups(engine(), specs | {source_name(1): wide})
    long = replace(specs[source_name(1)], block_size=128)
    with pytest.raises(ValueError, match=r"^got block sizes \[64, 128\]; need one because"):
        kv_cache_groups(engine(), specs | {source_name(1): long})
