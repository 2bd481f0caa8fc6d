"""HfDeepSpeedConfig: DeepSpeed's own configuration, with questions about it; transformers builds on it."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message

# Any in this file: keys and values of DeepSpeed's configuration.
reading = Deferred("hasten.extensions.deepspeed.config")
_OFFLOAD_DEVICES = ("cpu", "nvme")


class HfDeepSpeedConfig:
    """DeepSpeed's configuration from a mapping, a JSON file, or JSON in base64."""

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = []
        for section in ("optimizer", "param"):
            devices.append(
                self.get_value(f"zero_optimization.offload_{section}.device")
            )
        self._offload = self._stage in (2, 3) and any(
            device in _OFFLOAD_DEVICES for device in devices
        )

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the mapping that holds a dotted key, or None, and the key's last part."""
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for section_name in path:
            node = node.get(section_name)
            if node is None:
                return None, last
        return node, last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove what is under a dotted key. Raises: ValueError when it must exist and does not."""
        node, key = self.find_config_node(ds_key_long)
        if node is None or key not in node:
            if must_exist:
                raise ValueError(
                    f"Can't find {ds_key_long} entry in the config: {self.config}"
                )
            return
        del node[key]

    def is_true(self, ds_key_long: str) -> bool:
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        option_value = self.get_value(ds_key_long)
        return option_value is not None and not bool(option_value)

    def is_zero2(self) -> bool:
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        return self._offload


def _read_config(source: Any) -> dict[str, Any]:
    if isinstance(source, dict) or os.path.exists(source):  # noqa: PTH110 - pathlib raises for long text
        config: dict[str, Any] = reading.read_config(source)
        return config
    try:
        decoded: dict[str, Any] = json.loads(
            base64.urlsafe_b64decode(source).decode("utf-8")
        )
    except ValueError as error:
        raise ValueError(message("no_deepspeed_config", source)) from error
    return decoded
