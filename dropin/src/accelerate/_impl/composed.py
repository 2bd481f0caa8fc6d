"""hasten's Accelerator with the established attributes, as the parts of the drop-in's know it: they know no class above them."""

from __future__ import annotations

from functools import cached_property, wraps
from operator import attrgetter
from typing import Any

import hasten
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.enums import DistributedType, FP8BackendType
from accelerate._impl.settings.general import (
    DataLoaderConfiguration,
    ProjectConfiguration,
)
from accelerate._impl.surface.shown import shown_property
from accelerate._impl.views.state import AcceleratorState, GradientState
from hasten.accelerator.process import Process
from hasten.comm.base import Comm
from hasten.errors import PrepareError
from hasten.runtime.mesh_plan import BATCH, Axis
from hasten.strategies.choose import choose_strategy

# Any in this file: plugins and the user's objects, and parts that are defined above it.


def _of_process(name: str) -> Any:
    """Return the method of this process under the same name."""

    @wraps(getattr(Process, name))
    def call(self: Composed, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.process, name)(*args, **kwargs)

    return call


def _of_state(name: str, default: str, doc: str) -> Any:
    """Return a property read from the state, which raises after a reset; before there is one, from `default`."""
    read_default = attrgetter(default)
    return shown_property(
        lambda self: (
            getattr(self.state, name) if "state" in vars(self) else read_default(self)
        ),
        doc,
    )


def _make_settable(path: str, doc: str) -> Any:
    """Return a property that reads and writes what lies at a dotted path."""
    owner, _, attribute_name = path.rpartition(".")
    read_owner = attrgetter(owner)
    return shown_property(
        path, doc, lambda self, value: setattr(read_owner(self), attribute_name, value)
    )


class Composed(hasten.Accelerator):
    """An Accelerator whose parts are put in by a class above: read-only views on what lies elsewhere, and a few settable ones."""

    state: AcceleratorState
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    rng_types: list[str]
    step: int
    """Micro-steps in accumulate() since the start of the epoch."""
    _counted = 0
    step_scheduler_with_optimizer: bool
    _sharding: Any
    _engine: Any
    _sequences: Any

    def __getattr__(self, name: str) -> Any:
        # properties above that found none
        if name in AcceleratorState._known_attrs or name == "mixed_precision":
            return getattr(self.__dict__["state"], name)
        raise AttributeError(
            f"'{type(self).__name__}' object has no attribute '{name}'"
        )

    def follow_plugins(self) -> None:
        """Take over what was changed in plugins since the last prepare()."""
        # raises AttributeError after a reset of the states
        assert self.distributed_type in DistributedType
        self._sharding.follow_changes()
        self._engine.follow_changes()

    def readers(self) -> Comm:
        """Return the processes that have samples of their own; those of one sequence do, too, where they take turns (`sp_size`)."""
        if self._sequences is None:
            return self.ctx.groups(*BATCH)
        return self.ctx.world

    def share_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    def _accumulate_over(self, steps: int) -> None:
        self._clock.every = GradientState().plugin_kwargs["num_steps"] = steps

    gradient_accumulation_steps = shown_property(
        "_clock.every", "Micro-steps per update.", _accumulate_over
    )
    device = _of_state(
        "device", "ctx.device", "The device of this process, as PartialState shows it."
    )
    native_amp = cached_property(lambda self: self.config.mixed_precision != "no")
    multi_device = shown_property(
        lambda self: self.num_processes > 1 and self.device.type != "cpu",
        "Whether one of several.",
    )
    parallelism_config = shown_property(
        lambda self: AMBIENT.whole.get("parallelism_config"),
        "The sizes of the mesh, if given.",
    )

    torch_device_mesh = shown_property(
        lambda self: (
            self.parallelism_config
            and self.parallelism_config.get_device_mesh(self.device.type)
        ),
        "Torch's mesh, if sizes were given.",
    )
    should_save_model = shown_property(
        lambda self: True, "Whether this process writes weights."
    )
    fp8_enabled = cached_property(lambda self: self.config.mixed_precision == "fp8")

    @property
    def fp8_backend(self) -> FP8BackendType:
        if not self.fp8_enabled:
            return FP8BackendType("NO")
        backend = self.config.fp8.backend
        return FP8BackendType("AO" if backend == "auto" else backend.upper())

    has_fp8_handler = cached_property(
        lambda self: any(
            getattr(self, f"{kind}_recipe_handler", None)
            for kind in ("te", "ao", "msamp", "fp8")
        )
    )

    # -- the mesh -------------------------------------------------------------------------------------------------
    def _axis_index(self, words: str, *axes: Axis) -> int:
        if self.parallelism_config is None:
            raise RuntimeError(
                f"{words} parallelism is not configured. Set `parallelism_config` first."
            )
        return self.ctx.mesh.index(self.ctx.rank, *axes)

    tensor_parallel_rank = shown_property(
        lambda self: self._axis_index("Tensor", Axis.TP), "The place in a split layer."
    )
    data_parallel_rank = shown_property(
        lambda self: self._axis_index("Data", *BATCH), "The place among readers."
    )
    data_parallel_shard_rank = shown_property(
        lambda self: self._axis_index("Shard-based data", Axis.DP_SHARD), "The shard."
    )
    context_parallel_rank = shown_property(
        lambda self: self._axis_comm("Context", Axis.CP), "The place in a sequence."
    )
    pipeline_parallel_rank = shown_property(
        lambda self: self._axis_comm("Pipeline", Axis.PP), "The place among stages."
    )

    def _axis_comm(self, words: str, axis: Axis) -> int:
        if self.ctx.mesh.size(axis) == 1:
            raise NotImplementedError(
                f"{words} parallelism is currently not supported in Accelerate."
            )
        return self.ctx.mesh.index(self.ctx.rank, axis)

    # -- this process and the others --------------------------------------------------------------------------------
    distributed_type = shown_property(
        "state.distributed_type", "How processes work together."
    )
    num_processes = _of_state(
        "num_processes", "process.num_processes", "Processes in all."
    )
    process_index = _of_state(
        "process_index", "process.process_index", "The rank of this process."
    )
    local_process_index = _of_state(
        "local_process_index",
        "process.local_process_index",
        "The rank of this process on its node.",
    )
    mixed_precision = _of_state(
        "mixed_precision", "_precision.spec", "Compute precision."
    )
    is_main_process = _of_state(
        "is_main_process",
        "process.is_main_process",
        "Whether this is the first process.",
    )
    is_local_main_process = _of_state(
        "is_local_main_process",
        "process.is_local_main_process",
        "Whether it is the first of its node.",
    )
    is_last_process = _of_state(
        "is_last_process", "process.is_last_process", "Whether this is the last one."
    )
    use_distributed = shown_property(
        lambda self: self.num_processes > 1, "Whether there are other processes."
    )
    print = _of_process("print")
    on_main_process = _of_process("on_main_process")
    on_local_main_process = _of_process("on_local_main_process")
    on_last_process = _of_process("on_last_process")
    on_process = _of_process("on_process")
    on_local_process = _of_process("on_local_process")
    main_process_first = _of_process("main_process_first")
    local_main_process_first = _of_process("local_main_process_first")
    split_between_processes = _of_process("split_between_processes")
    set_trigger = _of_process("set_trigger")
    check_trigger = _of_process("check_trigger")

    # -- what lies in settings and components -----------------------------------------------------------------------
    deepspeed_plugin = shown_property(
        "state.deepspeed_plugin", "The DeepSpeed plugin in use, if any."
    )
    is_fsdp2 = shown_property("state.is_fsdp2", "Whether models are sharded.")
    is_composable_parallelism_enabled = shown_property(
        "is_fsdp2", "Whether axes of the mesh can be combined."
    )
    scaler = _make_settable("_precision.scaler", "Torch's loss scaler, under fp16.")
    split_batches = shown_property(
        "dataloader_config.split_batches",
        "Whether a loader's batch size is the global one.",
    )
    even_batches = _make_settable(
        "dataloader_config.even_batches",
        "Whether every process sees equally many samples.",
    )
    dispatch_batches = shown_property(
        "dataloader_config.dispatch_batches", "Whether the main process reads for all."
    )
    use_seedable_sampler = shown_property(
        "dataloader_config.use_seedable_sampler",
        "Whether seed and epoch give the order.",
    )
    non_blocking = shown_property(
        "dataloader_config.non_blocking", "Whether batches are copied without waiting."
    )
    use_stateful_dataloader = shown_property(
        "dataloader_config.use_stateful_dataloader", "Whether positions are restored."
    )
    project_dir = shown_property(
        "project_configuration.project_dir", "The project's folder."
    )
    logging_dir = shown_property(
        "project_configuration.logging_dir", "The folder of logs."
    )
    save_iteration = shown_property(
        "project_configuration.iteration",
        "The number the next automatic checkpoint gets.",
    )
    _models = _make_settable("_prepared.models", "As the original names it.")
    _optimizers = _make_settable("_prepared.optimizers", "As the original names it.")
    _schedulers = _make_settable("_prepared.schedulers", "As the original names it.")
    _dataloaders = _make_settable("_prepared.loaders", "As the original names it.")
    _custom_objects = _make_settable("_saving.registered", "As the original names it.")
    _save_model_state_pre_hook = _make_settable(
        "_saving.save_hooks", "As the original names it."
    )
    _load_model_state_pre_hook = _make_settable(
        "_saving.load_hooks", "As the original names it."
    )
    optimizer_step_was_skipped = shown_property(
        lambda self: any(
            optimizer.step_was_skipped for optimizer in self._prepared.optimizers
        ),
        "Whether the latest step of any optimizer was skipped.",
    )

    def _reconfigure(self, **sections: Any) -> None:
        """Replace whole sections of the settings before the first model is prepared.

        Raises: PrepareError if a model has been prepared already.
        """
        models = self._prepared.models
        if models:
            raise PrepareError(
                f"{', '.join(sections)} cannot change: a {type(models[0]).__name__} was prepared under the earlier "
                "settings and keeps its layout. Change them before the first prepare(), or make another Accelerator."
            )
        self.config = self.config.replace(**sections)
        self._strategy = choose_strategy(self.config, self.ctx)
        self._saving.reconfigure(self._strategy)
        self._preparer.reconfigure(self.config, self._strategy)
