"""Settings of torch.compile."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from hasten.config.base import Section, setting, settings

DynamoBackend = Literal[
    "no",
    "eager",
    "aot_eager",
    "inductor",
    "cudagraphs",
    "aot_ts_nvfuser",
    "nvprims_nvfuser",
    "ofi",
    "fx2trt",
    "onnxrt",
    "tensorrt",
    "tvm",
    "openxla",
    "aot_torchxla_trace_once",
    "torchxla_trace_once",
    "hpu_backend",
    "neuron",
]


@settings
class TorchDynamoPlugin(Section):
    """Options of torch.compile; backend "no" leaves the model as it is."""

    backend: DynamoBackend | str | Callable[..., Any] = setting(
        "no", "compiler backend (inductor, aot_eager, cudagraphs, …; no = off)"
    )
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = setting(
        "default", "balance of compile time and speed"
    )
    fullgraph: bool = setting(False, "a graph break is an error", flags=("dynamo_use_fullgraph",))
    dynamic: bool | None = setting(
        None, "compile for changing shapes (default: after the first change)", flags=("dynamo_use_dynamic",)
    )
    options: Mapping[str, Any] | None = setting(None, "options of the backend")
    disable: bool = setting(False, "turn compilation into a no-op for testing")
    use_regional_compilation: bool = setting(False, "compile the repeated block once instead of the whole model")

    @property
    def makes_cuda_graphs(self) -> bool:
        """Whether the compiler captures CUDA graphs of its own, whose outputs the next step overwrites."""
        graphs = self.mode in ("reduce-overhead", "max-autotune") or self.backend == "cudagraphs"
        return graphs and self.backend != "no" and not self.disable
