"""hasten's Accelerator with the established attributes, as the parts of the drop-in's know it: they know no class above them."""

from __future__ import annotations

import json
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import hasten
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.enums import DistributedType, FP8BackendType
from accelerate._impl.settings.general import DataLoaderConfiguration, ProjectConfiguration
from accelerate._impl.surface.shown import shown
from accelerate._impl.views.state import AcceleratorState, GradientState
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
    _counted = 0
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
        """Return the processes that have samples of their own; those of one sequence do, too, where they take turns (`sp_size`)."""
        return self.ctx.groups(*BATCH) if self._sequences is None else self.ctx.world

    def share_loader(self, data_loader: Any, *args: Any, **how: Any) -> Any:
        raise NotImplementedError

    def _accumulate_over(self, steps: int) -> None:
        self._clock.every = GradientState().plugin_kwargs["num_steps"] = steps

    gradient_accumulation_steps = shown("_clock.every", "Micro-steps per update.", _accumulate_over)
    device = shown("state.device", "The device of this process, as PartialState shows it.")
    native_amp = cached_property(lambda self: self.config.mixed_precision != "no")
    multi_device = shown(lambda self: self.num_processes > 1 and self.device.type != "cpu", "Whether one of several.")
    parallelism_config = shown(lambda self: AMBIENT.whole.get("parallelism_config"), "The sizes of the mesh, if given.")

    torch_device_mesh = shown(
        lambda self: self.parallelism_config and self.parallelism_config.get_device_mesh(self.device.type),
        "Torch's mesh, if sizes were given.",
    )
    should_save_model = shown(lambda self: True, "Whether this process writes weights.")
    fp8_enabled = cached_property(lambda self: self.config.mixed_precision == "fp8")

    @property
    def fp8_backend(self) -> FP8BackendType:
        backend = self.config.fp8.backend if self.fp8_enabled else "no"
        return FP8BackendType("AO" if backend == "auto" else backend.upper())

    has_fp8_handler = cached_property(
        lambda self: any(getattr(self, f"{kind}_recipe_handler", None) for kind in ("te", "ao", "msamp", "fp8"))
    )

    # -- the mesh -------------------------------------------------------------------------------------------------
    def _index(self, words: str, *axes: Axis) -> int:
        if self.parallelism_config is None:
            raise RuntimeError(f"{words} parallelism is not configured. Set `parallelism_config` first.")
        return self.ctx.mesh.index(self.ctx.rank, *axes)

    tensor_parallel_rank = shown(lambda self: self._index("Tensor", Axis.TP), "The place in a split layer.")
    data_parallel_rank = shown(lambda self: self._index("Data", *BATCH), "The place among readers.")
    data_parallel_shard_rank = shown(lambda self: self._index("Shard-based data", Axis.DP_SHARD), "The shard.")
    context_parallel_rank = shown(lambda self: self._along("Context", Axis.CP), "The place in a sequence.")
    pipeline_parallel_rank = shown(lambda self: self._along("Pipeline", Axis.PP), "The place among stages.")

    def _along(self, words: str, axis: Axis) -> int:
        if self.ctx.mesh.size(axis) == 1:
            raise NotImplementedError(f"{words} parallelism is currently not supported in Accelerate.")
        return self.ctx.mesh.index(self.ctx.rank, axis)


def _replace(path: str, self: Any, value: Any) -> None:
    part, _, name = path.rpartition(".")
    setattr(getattr(self, part), name, value)


for _name, (_path, _doc) in json.loads(Path(__file__).with_suffix(".json").read_text()).items():
    _change = partial(_replace, _path) if _path.startswith("_") or _name == "even_batches" else None
    setattr(Composed, _name, _made := shown(_path, _doc, _change) if _path else _of_state(_name, _doc))
    _made.__set_name__(Composed, _name)  # which errors say
