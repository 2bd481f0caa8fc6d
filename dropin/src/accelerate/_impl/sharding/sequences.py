"""Sequence parallelism of an Accelerator: its models attend over parts, its loaders hand them out, DeepSpeed knows the group."""

from __future__ import annotations

from typing import Any

from torch import nn

from accelerate._impl.ambient import AMBIENT
from accelerate._impl.composed import Composed
from accelerate._impl.loaders.base import PreparedLoader
from accelerate._impl.settings.general import DeepSpeedSequenceParallelConfig
from accelerate._impl.settings.parallelism import ParallelismConfig
from accelerate._impl.sharding.attention import SpannedAttention
from accelerate._impl.surface.messages import message
from hasten.accelerator.components import components
from hasten.comm.process_group import ProcessGroupComm
from hasten.runtime.mesh_plan import Axis
from hasten.strategies.context.sequence_parts import SequenceSplitter
from hasten.strategies.engines.deepspeed.engine import name_sequence_group

# Any in this file: the user's objects, and DeepSpeed.


class SplitSequences:
    """What prepare() does beside the rest where `sp_size` processes share a sequence."""

    def __init__(self, accelerator: Composed, handler: DeepSpeedSequenceParallelConfig) -> None:
        comm = accelerator.ctx.groups(Axis.CP)
        assert isinstance(comm, ProcessGroupComm), "several processes have a process group"
        self._accelerator, self._handler, self._comm = accelerator, handler, comm
        self._cut = SequenceSplitter(comm, None if handler.sp_seq_length_is_variable else handler.sp_seq_length)
        self._attention = SpannedAttention(comm, self._cut.lengths, _reading_parts)

    @classmethod
    def of(cls, accelerator: Composed, sizes: ParallelismConfig | None) -> SplitSequences | None:
        """What an Accelerator needs for its `sp_size`, or None where processes share no sequence."""
        handler = sizes.sp_handler if sizes is not None and sizes.sp_enabled else None
        return None if handler is None else cls(accelerator, handler)

    def attach(self, given: tuple[Any, ...]) -> list[nn.Module]:
        """The models among what prepare() is given, which attend over parts from now on."""
        known = {id(one) for one in components(self._accelerator).prepared.models}
        models = [one for one in given if isinstance(one, nn.Module)]
        for model in models:
            if id(model) not in known:
                self._attention.attach(model, self._handler.sp_attn_implementation)
        return models

    def join(self, prepared: tuple[Any, ...]) -> None:
        """Let loaders that were prepared with a model hand out parts."""
        if components(self._accelerator).strategy.name == "deepspeed":
            name_sequence_group(self._comm.group, self._accelerator.ctx.world.size)
        for one in prepared:
            if isinstance(one, PreparedLoader):
                self.split(one)

    def split(self, loader: Any) -> Any:
        """The loader, handing out parts from its next iteration on."""
        if not isinstance(loader, PreparedLoader):
            raise ValueError(message("loader_not_prepared", type(loader).__name__))
        loader.cut = self._cut
        return loader


def _reading_parts() -> bool:
    """Whether the innermost loader that is being iterated hands out parts."""
    return bool(AMBIENT.loaders) and getattr(AMBIENT.loaders[-1], "cut", None) is not None
