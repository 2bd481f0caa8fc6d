"""Settings of torch.compile."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from hasten.config.base import Section, setting, settings


@settings
class TorchDynamoPlugin(Section):
    """Options of torch.compile; backend "no" leaves the model as it is."""

    backend: str | Callable[..., Any] = setting("no", "compiler backend (inductor, aot_eager, cudagraphs, …; no = off)")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = setting(
        "default", "balance of compile time and speed"
    )
    fullgraph: bool = setting(False, "a graph break is an error")
    dynamic: bool | None = setting(None, "compile for changing shapes (default: after the first change)")
    options: Mapping[str, Any] | None = setting(None, "options of the backend")
    disable: bool = setting(False, "turn compilation into a no-op for testing")
    use_regional_compilation: bool = setting(False, "compile the repeated block once instead of the whole model")
