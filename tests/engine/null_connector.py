"""A connector that does nothing, to stand beside HiSparse below a MultiConnector."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from vllm_hisparse.testing.harness import multi

__all__ = ["NullConnector", "beside_null_connector"]


class NullConnector(KVConnectorBase_V1, SupportsHMA):
    """Finds nothing, loads nothing, saves nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


def beside_null_connector(transfer: dict[str, Any]) -> dict[str, Any]:
    """A MultiConnector's configuration with HiSparse, configured by `transfer`, and a `NullConnector`."""
    null = {
        "kv_connector": NullConnector.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
    }
    return multi(transfer, null)
