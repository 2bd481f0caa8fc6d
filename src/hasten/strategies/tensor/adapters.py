"""Adapters of PEFT under tensor parallelism: their matrices are linear layers, split as the layer beside them."""

from __future__ import annotations

from typing import Any

from torch import nn

from hasten.errors import ConfigError
from hasten.strategies.tensor.layers import LayerSplit, adapted_layer


def split_adapters(model: nn.Module, split: LayerSplit) -> None:
    """Replace adapters in the split by the layers inside them.

    Beside a layer split by its outputs, B is split by its outputs and A stays whole; beside one split by its inputs, A is
    split by its inputs and B stays whole.
    Raises: ConfigError for an adapter other than plain LoRA.
    """
    for name, style in list(split.styles.items()):
        adapter: Any = model.get_submodule(name)
        if adapted_layer(adapter) is adapter:
            continue
        del split.styles[name]
        if hasattr(adapter, "modules_to_save"):
            split.styles[f"{name}.original_module"] = style
            for adapter_name in adapter.modules_to_save:
                split.styles[f"{name}.modules_to_save.{adapter_name}"] = style
            continue
        if not _is_plain_lora(adapter) or not style.startswith(("colwise", "rowwise")):
            raise ConfigError(
                f"{name!r} is a {type(adapter).__module__}.{type(adapter).__name__}, and tensor parallelism splits adapters of "
                "linear layers that are plain LoRA: ranks would compute another update. Leave this layer out of the adapter's "
                "target_modules, or shard the model with strategy='fsdp'."
            )
        split.styles[f"{name}.base_layer"] = style
        is_split_by_outputs = style.startswith("colwise")
        split_matrix = "lora_B" if is_split_by_outputs else "lora_A"
        for adapter_name in adapter.lora_A:
            split.styles[f"{name}.{split_matrix}.{adapter_name}"] = style
            is_dropping = isinstance(adapter.lora_dropout[adapter_name], nn.Dropout)
            if is_split_by_outputs and is_dropping:
                split.common_dropouts.append(f"{name}.lora_dropout.{adapter_name}")


def _is_plain_lora(adapter: Any) -> bool:  # Any: a layer of PEFT
    """Return whether the adapter adds B(A(dropout(x))) to the output of its layer."""
    has_matrices = hasattr(adapter, "lora_A") and hasattr(adapter, "lora_B")
    uses_dora = any(getattr(adapter, "use_dora", {}).values())
    has_variant = bool(getattr(adapter, "lora_variant", None))
    return has_matrices and not uses_dora and not has_variant
