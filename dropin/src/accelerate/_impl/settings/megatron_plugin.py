"""MegatronLMPlugin: the established options of Megatron-LM, as hasten's settings."""

from __future__ import annotations

from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any

import hasten
from accelerate._impl.environment.variables import environment, str_to_bool
from accelerate._impl.surface import left_out

# Any in this file: values of options.
_DEFAULTS = {
    one.name: one.default
    for one in fields(hasten.MegatronLMPlugin)
    if one.default is not MISSING
}


class _Options:
    def __post_init__(self) -> None:
        variables = environment()
        for option_name, default in _DEFAULTS.items():
            variable_text = variables.get(f"MEGATRON_LM_{option_name.upper()}")
            if (
                variable_text
                and getattr(self, option_name) == default
                and isinstance(default, bool | int | float)
            ):
                setattr(
                    self,
                    option_name,
                    bool(str_to_bool(variable_text))
                    if isinstance(default, bool)
                    else type(default)(variable_text),
                )

    def to_hasten(self) -> hasten.MegatronLMPlugin:
        """Return the options that say something else than hasten does by itself."""
        option_values = {
            option_name: getattr(self, option_name) for option_name in _DEFAULTS
        }
        return hasten.MegatronLMPlugin(
            **{
                option_name: option_value
                for option_name, option_value in option_values.items()
                if option_value is not None and option_value != _DEFAULTS[option_name]
            }
        )


MegatronLMPlugin = make_dataclass(
    "MegatronLMPlugin",
    [(name, Any, field(default=default)) for name, default in _DEFAULTS.items()],
    bases=(_Options,),
)
MegatronLMPlugin.__module__ = "accelerate.utils.dataclasses"
MegatronLMPlugin.__doc__ = (
    "Options of Megatron-LM; None means as hasten does by itself."
)

add_model_config_to_megatron_parser = left_out.function(
    "utils.add_model_config_to_megatron_parser"
)
for _kind in ("bert", "gpt2", "t5", "llama", "glm4_moe"):
    globals()[f"parse_{_kind}_config"] = left_out.function(
        f"utils.dataclasses.parse_{_kind}_config"
    )
