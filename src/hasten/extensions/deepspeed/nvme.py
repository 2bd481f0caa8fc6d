"""Offload to NVMe: a folder for each engine, DeepSpeed's I/O library, and optimizer state moved between NVMe and memory."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from hasten.errors import PrepareError
from hasten.optional import need

# Any in this file: DeepSpeed is untyped.
log = logging.getLogger(__name__)

INSTALL: Final = "apt-get install libaio-dev g++ ninja-build"


def build_library() -> None:
    """Load DeepSpeed's library for asynchronous I/O; the first time, its compilation takes minutes.

    Raises: PrepareError if it cannot be built.
    """
    try:
        need("deepspeed.ops.op_builder").AsyncIOBuilder().load(verbose=False)
    # compilers, their drivers and DeepSpeed's GPU detection fail in many ways
    except Exception as error:
        raise PrepareError(
            "offload to NVMe needs DeepSpeed's library for asynchronous reads and writes, which could not be built "
            f"({type(error).__name__}: {next(iter(str(error).splitlines()), 'no details')}). Install its build dependencies "
            f"({INSTALL}), or use offload_optimizer.device='cpu'."
        ) from error


def create_engine_folder(zero: dict[str, Any]) -> Path | None:
    """Create a folder in `nvme_path` for one engine of this process and set it in `zero`; None without offload to NVMe.

    DeepSpeed names its files by parameter, so two engines in one folder would overwrite each other's files.
    """
    section = zero.get("offload_optimizer") or {}
    if section.get("device") != "nvme":
        return None
    nvme_path = str(section["nvme_path"])
    try:
        Path(nvme_path).mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="deepspeed-", dir=nvme_path)
    except OSError as error:
        raise PrepareError(
            f"zero_optimization.offload_optimizer.nvme_path={nvme_path!r} cannot be written ({error}), so the optimizer's state cannot be "
            "stored. Give a folder on the NVMe drive that this process may write to."
        ) from error
    section["nvme_path"] = folder
    return Path(folder)


def load_library(zero: dict[str, Any]) -> None:
    """Load DeepSpeed's I/O library if the optimizer's state is on NVMe."""
    if (zero.get("offload_optimizer") or {}).get("device") == "nvme":
        log.info(
            "loading DeepSpeed's library for NVMe; the first time it is compiled, which takes minutes"
        )
        build_library()


def remove_with(owner: object, folder: Path) -> None:
    """Remove the folder when its owner is garbage-collected or this process ends."""
    weakref.finalize(owner, _remove_folder, folder, os.getpid())


@contextmanager
def removed_on_error(folder: Path | None) -> Iterator[None]:
    """Context manager that removes the folder if the block raises."""
    try:
        yield
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove_folder(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)


class SwappedState:
    """Access to ZeRO-3's master weights, state and gradients on NVMe."""

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer

    def move_gradients(self) -> None:
        """Move the window's gradients to the buffers that the step reads; parameters that were not used get zeros."""
        self._zero._offload_boundary_param_ids = {
            parameter.ds_id for group in self._zero.fp16_groups for parameter in group
        }
        self._zero.finalize_gradient_accumulation_boundary()

    def finish_writes(self) -> None:
        """Wait for the writes of gradients that no step has read: the next window writes to the same files."""
        self._zero.optimizer_swapper.flush_gradients()

    @contextmanager
    def here(
        self, flat: Tensor, *, written: bool = False, replaced: bool = False
    ) -> Iterator[bool]:
        """Context manager in which a tensor of the optimizer and its state are in memory; yields whether they were on NVMe.

        `written` writes them back at the end; so does `replaced`, with the new state that the block sets for the optimizer.
        """
        zero = self._zero
        tensor_index = next(
            index
            for index, group_tensor in enumerate(zero.fp32_partitioned_groups_flat)
            if group_tensor is flat
        )
        # DeepSpeed keeps tensors below 1 MiB in memory
        if not zero._swappable_optimizer_subgroup(tensor_index):
            if replaced:
                zero.optimizer.state.pop(flat, None)
            yield False
            return
        swap_info = zero.optimizer_swapper.swap_params_info[flat.ds_id]  # type: ignore[attr-defined]
        # of the last step; they would occupy a buffer
        swap_info.swapped_gradients.clear()
        if replaced:
            zero.optimizer.state.pop(flat, None)
            del swap_info.tensors[1:]
            swap_info.has_state_tensors = False
        zero._optimizer_states_and_gradient_swap_in(tensor_index)
        try:
            yield True
        finally:
            if written or replaced:
                zero._optimizer_states_and_gradient_swap_out(tensor_index)
            else:
                zero._release_swap_buffers(tensor_index)
