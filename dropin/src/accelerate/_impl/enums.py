"""The closed sets of words that settings are made of."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, TypeVar

Member = TypeVar("Member")
# Any in this file: the values of members.


class EnumWithContains(enum.EnumMeta):
    """Lets `"fp16" in PrecisionType` ask for a value. `words` are the values: members are called so in capitals."""

    @classmethod
    def __prepare__(  # type: ignore[override]  # enum's own mapping
        cls, name: str, bases: tuple[type, ...], words: str = "", **kwargs: Any
    ) -> Any:
        members = super().__prepare__(name, bases, **kwargs)
        for word in words.split():
            members["COMETML" if word == "comet_ml" else word.upper()] = word
        return members

    def __new__(
        metacls, name: str, bases: Any, members: Any, words: str = "", **kwargs: Any
    ) -> EnumWithContains:
        return super().__new__(metacls, name, bases, members, **kwargs)

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True

    if TYPE_CHECKING:  # members are no attributes that a type checker sees

        def __getattr__(cls: type[Member], name: str) -> Member: ...


class BaseEnum(enum.Enum, metaclass=EnumWithContains):
    """An enum that prints as its value and can list its values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        return [member.value for member in cls]


class _Named(str, enum.Enum, metaclass=EnumWithContains):  # noqa: UP042  str() has always given the member's name
    """An enum of words that equal their members."""


class DistributedType(
    _Named,
    words="NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU DEEPSPEED FSDP XLA MEGATRON_LM MULTI_HPU MULTI_NEURON",
):
    """The ways in which processes work together."""


class SageMakerDistributedType(_Named, words="NO DATA_PARALLEL MODEL_PARALLEL"):
    """The ways in which SageMaker trains."""


class FP8BackendType(_Named, words="NO TE MSAMP AO"):
    """The library that computes in fp8."""


class ComputeEnvironment(_Named, words="LOCAL_MACHINE AMAZON_SAGEMAKER"):
    """The environments in which processes are started."""


class CustomDtype(enum.Enum, metaclass=EnumWithContains, words="fp8 int4 int2"):
    """Number formats torch has no dtype for."""


class DDPCommunicationHookType(
    BaseEnum, words="no fp16 bf16 power_sgd batched_power_sgd"
):
    """The compressions of gradients in communication."""


class DynamoBackend(
    str,
    BaseEnum,
    words="NO EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT ONNXRT TENSORRT AOT_TORCHXLA_TRACE_ONCE TORCHXLA_TRACE_ONCE TVM HPU_BACKEND NEURON",
):
    """Compilers of torch.compile."""


class LoggerType(
    BaseEnum,
    words="all aim tensorboard wandb trackio comet_ml mlflow clearml dvclive swanlab",
):
    """Trackers by name."""


class PrecisionType(str, BaseEnum, words="no fp8 fp16 bf16"):
    """Numbers of forward and backward."""


class RNGType(
    BaseEnum, words="torch cuda mlu sdaa musa npu xla xpu hpu neuron generator"
):
    """Random number generators."""
