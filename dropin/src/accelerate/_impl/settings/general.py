"""Every settings class by its established home; those of loaders, projects and parallel axes are defined here."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from accelerate._impl.settings.filled import fill, yes
from accelerate._impl.surface.messages import message

# Any in this file: the values of settings, and foreign configuration objects.


@dataclass
class DataLoaderConfiguration:
    """How loaders are split over processes."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """Where a project keeps its files."""

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


@dataclass
class TensorInformation:
    """Shape and type of a tensor that is not here."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass
class TorchTensorParallelPlugin:
    """The old way to ask for tensor parallelism."""

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism."""

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn("Async tensor parallelism is currently not supported, ignoring this option.", stacklevel=3)


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        fill(self, "PARALLELISM_CONFIG_", cp_comm_strategy=(str, "allgather"))
        if (given := self.cp_comm_strategy) not in ("allgather", "alltoall"):
            raise ValueError(f"Invalid cp_comm_strategy: {given}. Must be one of 'allgather' or 'alltoall'.")


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of DeepSpeed's sequence parallelism."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        fill(self, "PARALLELISM_CONFIG_", sp_seq_length=(_length, None), sp_attn_implementation=(str, None))
        fill(self, "PARALLELISM_CONFIG_", sp_seq_length_is_variable=(yes, True))
        self._check()

    def _check(self) -> None:
        if self.sp_attn_implementation in ("eager", "flex_attention"):
            raise ValueError(message("sp_attention", self.sp_attn_implementation))
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ValueError(message("sp_length_missing"))


def _length(word: str) -> int | None:
    return None if word == "None" else int(word)  # which the original's launcher writes
