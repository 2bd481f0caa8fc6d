"""hasten's Accelerator with the established attributes, as the parts of the drop-in's know it: they know no class above them."""

from __future__ import annotations

from typing import Any

import hasten
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.enums import DistributedType, FP8BackendType
from accelerate._impl.settings.general import DataLoaderConfiguration, ProjectConfiguration
from accelerate._impl.surface.shown import shown
from accelerate._impl.views.state import AcceleratorState
from hasten.comm.base import Comm
from hasten.runtime.mesh_plan import BATCH, Axis

# Any in this file: plugins and the user's objects, and parts that are defined above it.


def _of_state(name: str, doc: str) -> Any:
    """Return a property read from the state, which raises after a reset; before there is one, from hasten's Accelerator."""
    own: Any = getattr(hasten.Accelerator, name, None)
    return shown(lambda self: getattr(self.state, name) if "state" in vars(self) else own.__get__(self), doc)


class Composed(hasten.Accelerator):
    """An Accelerator whose parts are put in by a class above: read-only views on what lies elsewhere, and a few settable ones."""

    state: AcceleratorState
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    rng_types: list[str]
    step: int
    """Micro-steps in accumulate() since the start of the epoch."""
    step_scheduler_with_optimizer: bool
    _sharding: Any
    _engine: Any
    _sequences: Any

    def __getattr__(self, name: str) -> Any:
        if name in AcceleratorState._known_attrs or name == "mixed_precision":  # properties above that found none
            return getattr(self.__dict__["state"], name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def follow_plugins(self) -> None:
        """Take over what was changed in plugins since the last prepare()."""
        assert self.distributed_type in DistributedType  # raises AttributeError after a reset of the states
        self._sharding.follow()
        self._engine.follow()

    def readers(self) -> Comm:
        """The processes that have samples of their own; those of one sequence do, too, where they take turns (`sp_size`)."""
        return self.ctx.groups(*BATCH) if self._sequences is None else self.ctx.world

    distributed_type = _of_state("distributed_type", "How processes work together.")
    device = _of_state("device", "The device of this process.")
    num_processes = _of_state("num_processes", "Processes in all.")
    process_index = _of_state("process_index", "The rank of this process.")
    local_process_index = _of_state("local_process_index", "The rank of this process on its node.")
    mixed_precision = _of_state("mixed_precision", "Compute precision.")

    def _accumulate_over(self, steps: int) -> None:
        self._clock.every = AMBIENT.plugin_kwargs["num_steps"] = steps

    gradient_accumulation_steps = shown(
        "_clock.every", "Micro-steps per update; GradientState shows what is set here.", _accumulate_over
    )
    native_amp = shown(lambda self: self.config.mixed_precision in ("fp16", "bf16"), "Whether autocast is used.")
    multi_device = shown(lambda self: self.num_processes > 1, "Whether several processes train together.")
    deepspeed_plugin = shown("state.deepspeed_plugin", "The DeepSpeed plugin in use, if any.")
    parallelism_config = shown(lambda self: AMBIENT.whole.get("parallelism_config"), "The sizes of the mesh, if given.")

    torch_device_mesh = shown(
        lambda self: self.parallelism_config and self.parallelism_config.get_device_mesh(self.device.type),
        "Torch's mesh, if sizes were given.",
    )
    is_fsdp2 = shown(lambda self: self.distributed_type == DistributedType.FSDP, "Whether models are sharded.")
    is_composable_parallelism_enabled = shown("is_fsdp2", "Whether axes of the mesh can be combined.")
    should_save_model = shown(lambda self: True, "Whether this process writes weights.")
    fp8_enabled = shown(lambda self: self.config.mixed_precision == "fp8", "Whether fp8 is used.")

    @property
    def fp8_backend(self) -> FP8BackendType:
        """What computes in fp8."""
        backend = self.config.fp8.backend if self.fp8_enabled else "no"
        return FP8BackendType("AO" if backend == "auto" else backend.upper())

    has_fp8_handler = shown(
        lambda self: any(getattr(self, f"{kind}_recipe_handler", None) for kind in ("te", "ao", "msamp", "fp8")),
        "Whether a recipe for fp8 was given.",
    )
    scaler = shown("_precision.scaler", "Torch's loss scaler, under fp16.")

    # -- data -----------------------------------------------------------------------------------------------------
    split_batches = shown("dataloader_config.split_batches", "Whether a loader's batch size is the global one.")
    dispatch_batches = shown("dataloader_config.dispatch_batches", "Whether the main process reads for all.")

    even_batches = shown(
        "dataloader_config.even_batches",
        "Whether every process sees equally many samples.",
        lambda self, even: setattr(self.dataloader_config, "even_batches", even),
    )
    use_seedable_sampler = shown("dataloader_config.use_seedable_sampler", "Whether seed and epoch give the order.")
    non_blocking = shown("dataloader_config.non_blocking", "Whether batches are copied without waiting.")
    use_stateful_dataloader = shown("dataloader_config.use_stateful_dataloader", "Whether positions are restored.")

    # -- project --------------------------------------------------------------------------------------------------
    project_dir = shown("project_configuration.project_dir", "The project's folder.")
    logging_dir = shown("project_configuration.logging_dir", "The folder of logs.")
    save_iteration = shown("project_configuration.iteration", "The number the next automatic checkpoint gets.")

    # -- the mesh -------------------------------------------------------------------------------------------------
    def _index(self, words: str, *axes: Axis) -> int:
        if self.parallelism_config is None:
            raise RuntimeError(f"{words} is not configured. Set `parallelism_config` first.")
        return self.ctx.mesh.index(self.ctx.rank, *axes)

    tensor_parallel_rank = shown(lambda self: self._index("Tensor parallelism", Axis.TP), "The place in a split layer.")
    data_parallel_rank = shown(lambda self: self._index("Data parallelism", *BATCH), "The place among readers.")
    data_parallel_shard_rank = shown(
        lambda self: self._index("Shard-based data parallelism", Axis.DP_SHARD), "The place among shards of a model."
    )
    context_parallel_rank = shown(lambda self: self._index("Context parallelism", Axis.CP), "The place in a sequence.")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The place among the stages of a pipeline."""
        if self.ctx.mesh.size(Axis.PP) == 1:
            raise NotImplementedError("this run has no pipeline; set pp_size in hasten's parallelism_config for one.")
        return self.ctx.mesh.index(self.ctx.rank, Axis.PP)

    # -- what was prepared ----------------------------------------------------------------------------------------
    _models = shown("_prepared.models", "As the original names it")
    _optimizers = shown("_prepared.optimizers", "As the original names it")
    _schedulers = shown("_prepared.schedulers", "As the original names it")
    _dataloaders = shown("_prepared.loaders", "As the original names it")
    _custom_objects = shown("_saving.registered", "As the original names it")
    _save_model_state_pre_hook = shown("_saving.save_hooks", "As the original names it")
    _load_model_state_pre_hook = shown("_saving.load_hooks", "As the original names it")
