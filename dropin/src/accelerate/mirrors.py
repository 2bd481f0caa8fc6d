"""Attributes of the established Accelerator that mirror what hasten keeps elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.ambient import AMBIENT
from accelerate.utils.enums import DistributedType, FP8BackendType
from hasten.runtime.axes import BATCH, Axis

if TYPE_CHECKING:
    import hasten
    from accelerate.state import AcceleratorState
    from accelerate.utils.dataclasses import DataLoaderConfiguration, ProjectConfiguration

    Base = hasten.Accelerator
else:
    Base = object

# Any in this file: plugins and the user's objects.


class Mirrors(Base):
    """Read-only views, and the few settable ones."""

    if TYPE_CHECKING:
        state: AcceleratorState
        dataloader_config: DataLoaderConfiguration
        project_configuration: ProjectConfiguration

    @property
    def distributed_type(self) -> DistributedType:
        """How processes work together."""
        found: DistributedType = AMBIENT.whole["distributed_type"]
        return found

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per update; GradientState shows what is set here."""
        return self.clock.every

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.clock.every = AMBIENT.plugin_kwargs["num_steps"] = value

    @property
    def mixed_precision(self) -> str:
        """Numbers of forward and backward."""
        return self.config.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether autocast is used."""
        return self.config.mixed_precision in ("fp16", "bf16")

    @property
    def multi_device(self) -> bool:
        """Whether several devices or CPU processes train together."""
        return self.num_processes > 1

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed plugin in use, if any."""
        return self.state.deepspeed_plugin

    @property
    def parallelism_config(self) -> Any:
        """The sizes of the mesh, if they were given."""
        return AMBIENT.whole.get("parallelism_config")

    @property
    def torch_device_mesh(self) -> Any:
        """Torch's mesh, if sizes were given."""
        config = self.parallelism_config
        return None if config is None else config.get_device_mesh(self.device.type)

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether axes of the mesh can be combined."""
        return self.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes weights."""
        return True

    @property
    def fp8_enabled(self) -> bool:
        """Whether fp8 is used."""
        return self.config.mixed_precision == "fp8"

    @property
    def fp8_backend(self) -> FP8BackendType:
        """What computes in fp8."""
        if not self.fp8_enabled:
            return FP8BackendType.NO
        return (
            FP8BackendType(self.config.fp8.backend.upper()) if self.config.fp8.backend != "auto" else FP8BackendType.AO
        )

    @property
    def has_fp8_handler(self) -> bool:
        """Whether a recipe for fp8 was given."""
        return any(getattr(self, f"{kind}_recipe_handler", None) for kind in ("te", "ao", "msamp", "fp8"))

    @property
    def scaler(self) -> Any:
        """Torch's loss scaler, under fp16."""
        return self.precision.scaler

    @property
    def step(self) -> int:
        """Micro-steps of the current window."""
        return self.clock.micro

    # -- data -----------------------------------------------------------------------------------------------------
    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether every process sees equally many samples."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling is a function of seed and epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether a loader's position is restored."""
        return self.dataloader_config.use_stateful_dataloader

    # -- project --------------------------------------------------------------------------------------------------
    @property
    def project_dir(self) -> str | None:
        """The project's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number the next automatic checkpoint gets."""
        return self.project_configuration.iteration

    # -- the mesh -------------------------------------------------------------------------------------------------
    def _index(self, words: str, *axes: Axis) -> int:
        if self.parallelism_config is None:
            raise RuntimeError(f"{words} is not configured. Set `parallelism_config` first.")
        return self.ctx.mesh.index(self.ctx.rank, *axes)

    @property
    def tensor_parallel_rank(self) -> int:
        """The place among processes that split layers."""
        return self._index("Tensor parallelism", Axis.TP)

    @property
    def data_parallel_rank(self) -> int:
        """The place among processes that read different samples."""
        return self._index("Data parallelism", *BATCH)

    @property
    def data_parallel_shard_rank(self) -> int:
        """The place among processes that share a model."""
        return self._index("Shard-based data parallelism", Axis.DP_SHARD)

    @property
    def context_parallel_rank(self) -> int:
        """The place among processes that split sequences."""
        return self._index("Context parallelism", Axis.CP)

    @property
    def pipeline_parallel_rank(self) -> int:
        """The place among the stages of a pipeline."""
        if self.ctx.mesh.size(Axis.PP) == 1:
            raise NotImplementedError("this run has no pipeline; set pp_size in hasten's parallelism_config for one.")
        return self.ctx.mesh.index(self.ctx.rank, Axis.PP)

    # -- what was prepared ----------------------------------------------------------------------------------------
    @property
    def _models(self) -> list[Any]:
        return self.prepared.models

    @property
    def _optimizers(self) -> list[Any]:
        return self.prepared.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self.prepared.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self.prepared.loaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self.saving.registered
