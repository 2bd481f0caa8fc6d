"""Sequence parallelism of an Accelerator: its models attend over parts, its loaders hand them out, DeepSpeed knows the group."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from accelerate._impl.ambient import AMBIENT
from accelerate._impl.composed import Composed
from accelerate._impl.loaders.base import PreparedLoader
from accelerate._impl.loaders.sequence_parts import SequenceSplitter
from accelerate._impl.models import big_modeling
from accelerate._impl.settings.general import DeepSpeedSequenceParallelConfig
from accelerate._impl.surface.messages import message
from hasten.accelerator.components import components
from hasten.comm.process_group import ProcessGroupComm
from hasten.errors import PrepareError, StepError
from hasten.optional import need
from hasten.runtime.mesh_plan import Axis
from hasten.strategies.context.attention import SequenceGroup
from hasten.strategies.context.calls import SPANNING_ATTENTION
from hasten.strategies.context.masks import MaskReader
from hasten.strategies.context.sdpa import SequenceAttention
from hasten.strategies.context.sequence_plan import SequenceLayout

# Any in this file: the user's objects; DeepSpeed and transformers are untyped here.


def _name_sequence_group(group: dist.ProcessGroup, world_size: int) -> None:
    """Register the sequence-parallel group with DeepSpeed, for libraries that query it; averages still span all processes."""
    groups = need("deepspeed").utils.groups
    groups.mpu = None
    everyone = groups._get_data_parallel_group()
    groups.mpu = SimpleNamespace(
        get_sequence_parallel_group=lambda: group,
        get_data_parallel_group=lambda: everyone,
        get_data_parallel_world_size=lambda: world_size,
        get_data_parallel_group_ranks=lambda: range(world_size),
        get_model_parallel_world_size=lambda: 1,
    )


class SpannedAttention:
    """Attention function for transformers that spans the shards of all processes, in training and while shards are read."""

    def __init__(
        self,
        comm: ProcessGroupComm,
        lengths: set[int],
        reading_parts: Callable[[], bool],
    ) -> None:
        layout = SequenceLayout(comm.size, balanced=False)
        self._attention = SequenceAttention(
            functional.scaled_dot_product_attention,
            SequenceGroup(comm.group, layout),
            "ulysses",
            frozenset(),
            MaskReader(layout),
            begin=lambda: None,
        )
        self._ranks = comm.size
        self._lengths = lengths
        self._reading_parts = reading_parts

    def attach(self, model: nn.Module, attention_kind: str | None) -> None:
        """Make the model attend to whole sequences. Raises: PrepareError unless it uses transformers' attention functions."""
        inner: Any = model
        big_modeling._refuse_recurrent_layers_under_sequence_parallelism(model)
        if not getattr(inner, "_supports_attention_backend", False):
            raise PrepareError(
                message("attention_not_replaceable", type(model).__name__, self._ranks)
            )
        if (
            attention_name := attention_kind or inner.config._attn_implementation
        ) not in (
            "sdpa",
            SPANNING_ATTENTION,
        ):
            raise PrepareError(
                message("attention_by_another_kernel", attention_name, self._ranks)
            )
        transformers = need("transformers", ">=5", "ParallelismConfig(sp_size=...)")
        transformers.AttentionInterface.register(SPANNING_ATTENTION, self)
        transformers.AttentionMaskInterface.register(
            SPANNING_ATTENTION, need("transformers.masking_utils").sdpa_mask
        )
        inner.set_attn_implementation(SPANNING_ATTENTION)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        # evaluation reads whole sequences
        if not module.training and not self._reading_parts():
            whole_attention = need(
                "transformers.integrations.sdpa_attention"
            ).sdpa_attention_forward
            attention_options = {
                "dropout": dropout,
                "scaling": scaling,
                "is_causal": is_causal,
                **kwargs,
            }
            out: tuple[Tensor, None] = whole_attention(
                module, query, key, value, attention_mask, **attention_options
            )
            return out
        self._check(query.shape[-2], kwargs.get("sliding_window"))
        if is_causal is not None:
            causal = is_causal
        else:
            causal = bool(getattr(module, "is_causal", True))
        gqa = query.shape[1] != key.shape[1]
        mixed = self._attention(
            query,
            key,
            value,
            attention_mask,
            dropout,
            causal and attention_mask is None,
            scaling,
            enable_gqa=gqa,
        )
        return mixed.transpose(1, 2).contiguous(), None

    def _check(self, length: int, window: int | None) -> None:
        if length not in self._lengths:
            raise StepError(message("sequences_not_split", length, self._ranks))
        if window is not None and window < length * self._ranks:
            raise StepError(
                message("window_too_short", window, length * self._ranks, self._ranks)
            )
        self._attention.lengths = frozenset(self._lengths)


class SplitSequences:
    """The additional preparation where `sp_size` processes share a sequence."""

    def __init__(
        self, accelerator: Composed, handler: DeepSpeedSequenceParallelConfig
    ) -> None:
        comm = accelerator.ctx.groups(Axis.CP)
        assert isinstance(comm, ProcessGroupComm), (
            "several processes have a process group"
        )
        # which owns this object
        self._accelerator: Composed = weakref.proxy(accelerator)
        self._handler = handler
        self._comm = comm
        self._cut = SequenceSplitter(
            comm, None if handler.sp_seq_length_is_variable else handler.sp_seq_length
        )
        self._attention = SpannedAttention(comm, self._cut.lengths, _reading_parts)

    def attach(self, arguments: tuple[Any, ...]) -> list[nn.Module]:
        """Return the models among what prepare() is given, which attend over parts from now on."""
        prepared_ids = set()
        for candidate in components(self._accelerator).prepared.models:
            prepared_ids.add(id(candidate))
        models = []
        for candidate in arguments:
            if isinstance(candidate, nn.Module):
                models.append(candidate)
        for model in models:
            if id(model) not in prepared_ids:
                self._attention.attach(model, self._handler.sp_attn_implementation)
        return models

    def join(self, prepared: tuple[Any, ...]) -> None:
        """Let loaders that were prepared with a model hand out parts."""
        if components(self._accelerator).strategy.name == "deepspeed":
            _name_sequence_group(self._comm.group, self._accelerator.ctx.world.size)
        for prepared_object in prepared:
            if isinstance(prepared_object, PreparedLoader):
                self.split(prepared_object)

    def split(self, loader: Any) -> Any:
        if not isinstance(loader, PreparedLoader):
            raise ValueError(message("loader_not_prepared", type(loader).__name__))
        loader.cut = self._cut
        return loader


def _reading_parts() -> bool:
    """Return whether the innermost loader that is being iterated hands out parts."""
    return (
        bool(AMBIENT.loaders) and getattr(AMBIENT.loaders[-1], "cut", None) is not None
    )
