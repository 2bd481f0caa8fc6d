"""Settings that stand for themselves: of loaders, projects, parallel axes and bitsandbytes, checked as the original checks them."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from accelerate._impl.enums import CustomDtype
from accelerate._impl.settings.filled import fill_from_variables, is_yes
from accelerate._impl.surface.messages import message

# Any in this file: the values of settings, and foreign configuration objects.
_KERNELS = ["flash_attention_2", "flash_attention_3", "sdpa"]
_KINDS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("load_in_8bit load_in_4bit bnb_4bit_use_double_quant", bool, "a boolean"),
    ("llm_int8_threshold", (int, float), "a float or an int"),
    ("skip_modules keep_in_fp32_modules", (list, type(None)), "a list of strings"),
)
_DTYPES: Final = (
    ("fp32", torch.float32),
    ("fp16", torch.float16),
    ("bf16", torch.bfloat16),
)


@dataclass
class DataLoaderConfiguration:
    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """The folders and limits of a project's files."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Take a project folder; logs go there unless they have a folder of their own."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def over(self, make: Callable[..., Any]) -> Any:
        field_names = (
            "project_dir",
            "logging_dir",
            "total_limit",
            "iteration",
            "save_on_each_node",
        )
        values: dict[str, Any] = {
            field_name: getattr(self, field_name) for field_name in field_names
        }
        return make(
            **values
            | {
                field_name: str(values[field_name])
                for field_name in field_names[:2]
                if values[field_name] is not None
            }
        )


@dataclass
class TensorInformation:
    """Shape and type of a tensor that is not here."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass
class TorchTensorParallelPlugin:
    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class TorchTensorParallelConfig:
    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn(
                "Async tensor parallelism is currently not supported, ignoring this option.",
                stacklevel=3,
            )


@dataclass
class TorchContextParallelConfig:
    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        fill_from_variables(
            self, "PARALLELISM_CONFIG_", cp_comm_strategy=(str, "allgather")
        )
        if (comm_strategy := self.cp_comm_strategy) not in ("allgather", "alltoall"):
            raise ValueError(
                f"Invalid cp_comm_strategy: {comm_strategy}. Must be one of 'allgather' or 'alltoall'."
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        fill_from_variables(
            self,
            "PARALLELISM_CONFIG_",
            sp_seq_length=(_sequence_length, None),
            sp_attn_implementation=(str, None),
        )
        fill_from_variables(
            self, "PARALLELISM_CONFIG_", sp_seq_length_is_variable=(is_yes, True)
        )
        self._check_folder()

    def _check_folder(self) -> None:
        if (kind := self.sp_attn_implementation) in ("eager", "flex_attention"):
            raise ValueError(message("sp_attention", kind))
        if (
            kind is not None
            and kind not in _KERNELS
            and not re.fullmatch(".*/.*flash-attn.*", kind)
        ):
            raise ValueError(message("sp_attention_unknown", kind, _KERNELS))
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ValueError(message("sp_length_missing"))


def _sequence_length(word: str) -> int | None:
    return None if word == "None" else int(word)  # which the original's launcher writes


@dataclass
class BnbQuantizationConfig:
    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for field_names, field_type, words in _KINDS:
            for field_name in field_names.split():
                if not isinstance(getattr(self, field_name), field_type):
                    raise ValueError(
                        f"{field_name.replace('fp32', 'fp_32')} must be {words}"
                    )
        self._check_bits()
        self.bnb_4bit_compute_dtype = _dtype_of(
            "bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype
        )
        if self.torch_dtype is None:
            if self.load_in_4bit:
                self.torch_dtype = self.bnb_4bit_compute_dtype
            else:
                self.torch_dtype = torch.float16
        self.torch_dtype = _dtype_of("torch_dtype", self.torch_dtype)
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8

    def _check_bits(self) -> None:
        if self.load_in_8bit == self.load_in_4bit:
            raise ValueError(
                f"load_in_4bit and load_in_8bit can't be both {self.load_in_8bit}"
            )
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ValueError(
                f"bnb_4bit_quant_type must be in ['fp4','nf4'] but found {self.bnb_4bit_quant_type}"
            )


def _dtype_of(name: str, value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    if value not in dict(_DTYPES):
        raise ValueError(f"{name} must be in ['fp32','fp16','bf16'] but found {value}")
    return dict(_DTYPES)[value]
