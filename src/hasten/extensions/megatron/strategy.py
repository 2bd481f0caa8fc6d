"""MegatronStrategy: language models on megatron-core's layers and schedules, behind the interface of all strategies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten import trees
from hasten.comm.base import Comm
from hasten.comm.process_group import ProcessGroupComm
from hasten.config.root import Config
from hasten.errors import ConfigError, PrepareError, StepError
from hasten.extensions.megatron import engine as megatron_engine
from hasten.extensions.megatron.call import Given
from hasten.extensions.megatron.config import translate
from hasten.extensions.megatron.families import ModelFacts, check_class, model_facts
from hasten.extensions.megatron.model import Calls, MegatronModel, StageOutput
from hasten.extensions.megatron.optimizer import MegatronOptimizer
from hasten.extensions.megatron.package import hushed, own_ranks, package
from hasten.extensions.megatron.settings import MegatronLMPlugin
from hasten.extensions.megatron.shard_plan import expert_of, renumbered
from hasten.extensions.megatron.weights import box_of, part_of, to_hub
from hasten.modules.names import StagePart
from hasten.optim.gradients import drop_gradients
from hasten.optim.window import backpropagate
from hasten.precision.base import Precision
from hasten.prepare_args import Item, PrepareArguments
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import LOSS, Axis
from hasten.strategies.base import Caps, OfferedStrategy, PrepareRequest, Weigh
from hasten.strategies.context.ops import all_parts
from hasten.strategies.micro_batches import check_rows, share
from hasten.strategies.native import make_optimizers
from hasten.strategies.placing import Convert, PlaceOnDevice
from hasten.strategies.weight_sources import WeightSource, copy_from_rank_0, source_of
from hasten.trees import Tree


def whole_weights(model: MegatronModel, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter as a whole tensor, and the same tensor of the experts on other ranks. Ranks: every rank of a stage."""
    state = package("parallel_state")
    own = _joined(model, parameter)
    if not model.is_expert(parameter):
        yield name, own
        return
    number = expert_of(name)
    assert number is not None, f"{name} belongs to an expert"
    place = number - model.first_expert(model.ranks.ep[0])
    for rank, theirs in enumerate(all_parts(own, state.get_expert_model_parallel_group())):
        yield renumbered(name, model.first_expert(rank) + place), theirs


def _joined(model: MegatronModel, parameter: Tensor) -> Tensor:
    at = model.place_of(parameter)
    if not model.split(parameter):
        return part_of(parameter.detach(), at)
    state = package("parallel_state")
    group = (
        state.get_expert_tensor_parallel_group()
        if model.is_expert(parameter)
        else state.get_tensor_model_parallel_group()
    )
    whole = torch.empty(at.shape, dtype=parameter.dtype, device=parameter.device)
    for rank, theirs in enumerate(all_parts(parameter.detach(), group)):
        their = model.place_of(parameter, rank)
        box_of(whole, their).copy_(part_of(theirs, their))
    return whole


def owner_of(models: list[Item], optimizers: list[Item], taken: bool) -> Item | None:
    """Return the model to train. Raises: PrepareError unless there is one optimizer for one model."""
    if not optimizers:
        return None
    params = {id(p) for item in optimizers for group in item.value.param_groups for p in group["params"]}
    owners = [item for item in models if params & {id(p) for p in item.value.parameters()}]
    if len(owners) != 1 or len(optimizers) != 1 or taken:
        raise PrepareError(
            f"{len(optimizers)} optimizers with parameters of {len(owners)} models were prepared"
            f"{', after another one' if taken else ''}; an engine trains one model with one optimizer. Prepare one model together "
            "with an optimizer over its parameters."
        )
    return owners[0]


def groups_by_name(module: nn.Module, optimizer: Optimizer) -> dict[str, int | None]:
    """Return the optimizer's group of each tensor of the Hub layout; None for a frozen one.

    Raises: PrepareError for a trainable parameter that is in no group.
    """
    number = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found: dict[str, int | None] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and id(parameter) not in number:
            raise PrepareError(
                f"{name} requires gradients, but is not in the optimizer; the engine clips and updates all trainable parameters. Add it to "
                "the optimizer, or call requires_grad_(False) on it."
            )
        found[name] = number.get(id(parameter)) if parameter.requires_grad else None
    return found


def bind(optimizer: Optimizer, model: MegatronModel, groups: Mapping[str, int | None]) -> None:
    """Put this rank's parameters into the optimizer's groups of the tensors they were made from."""
    members: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    for name, parameter in model.held.items():
        origins = {groups[hub] for hub in model.entries[name].hub if hub in groups}
        if len(origins) != 1:
            raise PrepareError(
                f"{', '.join(model.entries[name].hub)} are one tensor in the engine, but are in different parameter groups (or only "
                "some are frozen); put them into one group."
            )
        if (group := origins.pop()) is None:
            raise PrepareError(
                f"{model.entries[name].hub[0]} is frozen, but the engine needs gradients for every parameter of the model; train all "
                "parameters, or use strategy='fsdp'."
            )
        members[group].append(parameter)
    for own, params in zip(optimizer.param_groups, members, strict=True):
        own["params"] = params


LossOf = Callable[[nn.Module, Tree], Tensor]


class MegatronStrategy:
    """Strategy that trains one language model on an engine; models without an optimizer are placed and left whole."""

    name = "megatron"

    def __init__(self, config: Config, ctx: ProcessContext) -> None:
        package()
        megatron_engine.refuse_other_devices(ctx)
        for name, set_ in (
            ("gradient_accumulation.sync_each_batch", config.gradient_accumulation.sync_each_batch),
            ("dynamo.backend", config.dynamo.backend != "no"),
            ("recompute", bool(config.recompute)),
        ):
            if set_:
                raise ConfigError(
                    f"{name} is not supported with strategy='megatron', whose engine manages layers and gradients itself; remove it (to "
                    "recompute, set megatron.recompute_activations)."
                )
        plugin = config.section(MegatronLMPlugin)
        if config.checkpoint_in_memory and plugin.expert_model_parallel_size > 1:
            raise ConfigError(
                f"checkpoint_in_memory={config.checkpoint_in_memory} is not supported with megatron.expert_model_parallel_size="
                f"{plugin.expert_model_parallel_size}, because the experts of a checkpoint come from several machines. Remove "
                "it, and call save_state() regularly."
            )
        self._config, self._plugin, self._ctx = config, plugin, ctx
        self._place, self._convert = PlaceOnDevice(), Convert(config.master_weights)
        self.caps = Caps(
            owns_precision=True, sharded_state=True, synchronises=False, hides_gradients=True, splits_sequences=True
        )
        self.model: MegatronModel | None = None
        self.optimizer: MegatronOptimizer | None = None
        self._given: Optimizer | None = None
        self._pp = ctx.groups(Axis.PP)

    # -- preparing ------------------------------------------------------------------------------------------------
    def building(self, ctx: ProcessContext) -> AbstractContextManager[None]:
        return nullcontext()  # prepare() shards models

    def prepare(self, bundle: PrepareArguments, ctx: ProcessContext, precision: Precision, train: bool = True) -> None:
        models, optimizers = bundle.of("model"), bundle.of("optimizer")
        make_optimizers(optimizers, [item.value for item in models])
        owner = owner_of(models, optimizers, self.model is not None) if train else None
        for item in models:
            if item is owner:
                self._start(item, optimizers[0])
                continue
            request = PrepareRequest(place=item.place, train=False)
            placed = self._place.apply(item.value, request, ctx, precision)
            item.value = self._convert.apply(placed, request, ctx, precision)
        for item in bundle.of("scheduler"):
            if self._given is not None and getattr(item.value, "optimizer", None) is self._given:
                item.value.optimizer = self.optimizer

    def _start(self, item: Item, optimizer: Item) -> None:
        given: Optimizer = optimizer.value
        module: Any = item.value  # Any: a model of transformers
        if given.state:
            raise PrepareError(
                f"{type(given).__name__} has state of earlier steps, which would be lost when the engine creates its parameters. "
                "Prepare a new optimizer, and load the state with load_state()."
            )
        facts = _facts_of(module)
        made = translate(self._plugin, facts, self._config.mixed_precision)
        groups = groups_by_name(module, given)
        source = source_of(module, self._config.fsdp, self._ctx, buffers=False)
        if source is WeightSource.RANK_0:
            _materialise(module, self._ctx.device)
        if source is not WeightSource.NO_RANK:
            copy_from_rank_0(module, self._ctx)
        megatron_engine.join(self._plugin, self._ctx)
        seed = int(self._ctx.world.broadcast_object(torch.initial_seed() % 2**31))
        shared = self._plugin.use_distributed_optimizer
        built = megatron_engine.build(made, facts, source is WeightSource.NO_RANK, seed, shared)
        calls = Calls(self._evaluate, self._draw)
        model = MegatronModel(built, facts, module.config, own_ranks(), self._plugin, calls)
        if source is not WeightSource.NO_RANK:
            model.fill(dict(module.state_dict()))
        bind(given, model, groups)
        self._cut(model)
        model.train(module.training)
        self.model, self._given = model, given
        self.optimizer = MegatronOptimizer(model, given, self._plugin.gradient_clipping, seed, shared)
        item.value, optimizer.value = model, self.optimizer

    def _cut(self, model: MegatronModel) -> None:
        """Declare the state of other ranks to checkpoints: other stages and other experts. Ranks: every rank."""
        divided = model.ranks.ep[1] > 1
        if self._pp.size == 1 and not divided:
            return
        everyone: list[list[str]] = self._pp.all_gather_object(list(model.held))
        copies = {name for names in everyone[: self._pp.rank] for name in names}
        if model.ranks.ep[0] > 0:
            copies |= {name for name, parameter in model.held.items() if not model.is_expert(parameter)}
        model.stage_part = StagePart(
            state_keys=tuple(model.entries),
            parameters=frozenset(model.entries),
            own_keys=frozenset(model.held) - copies,
            copies=frozenset(model.held) & copies,
            axes=frozenset({Axis.PP, *(LOSS if divided else ())}),
            first=model.ranks.first_of_experts if divided else True,
        )

    # -- one step -------------------------------------------------------------------------------------------------
    def _draw(self) -> None:
        """Seed the random numbers of a batch from the run's seed and the number of batches, so no other state is saved."""
        model, optimizer = self._trained()
        config = model.built.config
        if not (config.hidden_dropout or config.attention_dropout) or not model.training:
            return
        seed, number = optimizer.draws
        optimizer.draws[1] += 1
        place = self._ctx.mesh.index(self._ctx.rank, *LOSS), self._pp.rank
        digest = hashlib.sha256(f"{seed}/{number}/{place}".encode()).digest()
        random = package("tensor_parallel.random")
        random.model_parallel_cuda_manual_seed(int.from_bytes(digest[:5], "little"), force_reset_rng=True)

    def _trained(self) -> tuple[MegatronModel, MegatronOptimizer]:
        if self.model is None or self.optimizer is None:
            raise StepError(
                "backward() was called before a model was prepared together with its optimizer, so there is nothing to train; call "
                "prepare(model, optimizer) first."
            )
        return self.model, self.optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()  # gradients are reduced at the window's end

    def backward(self, loss: Tensor, parts: int = 1, **kwargs: Any) -> None:  # Any: torch's keywords
        if self._pp.size > 1:
            raise StepError(
                "accelerator.backward() cannot reach the layers that are on other pipeline ranks (megatron.pp_degree > 1). Replace the "
                "forward and the backward of the loop by loss = accelerator.forward_backward(model, batch, loss_of), where "
                "loss_of takes the model and a batch and returns the loss."
            )
        self._trained()[1].passed()
        with hushed():
            backpropagate(loss, parts, **kwargs)

    def forward_backward(
        self,
        model: nn.Module,
        batch: Tree,
        loss_of: LossOf,
        weigh: Weigh,
        weight: Callable[[Tree], float | Tensor] | None = None,
    ) -> Tensor:
        trained, optimizer = self._trained()
        if weight is not None:
            raise StepError(
                "forward_backward(weight=...) is not supported under Megatron-LM, whose schedule gives all micro-batches the same "
                "weight. Remove weight and use batches with equal numbers of labels, or strategy='auto' with pp_size."
            )
        if model is not trained:
            raise StepError(
                f"forward_backward() was called with a {type(model).__name__} that was not prepared with an optimizer; pass the model "
                "that prepare() returned."
            )
        count = self._plugin.num_micro_batches
        rows = check_rows(trees.batch_size(batch), count)
        micros = [trees.slice_rows(batch, slice(i * rows, (i + 1) * rows), rows * count) for i in range(count)]
        factor = (
            weigh(torch.ones((), device=self._ctx.device)) / trained.ranks.cp[1]
        )  # the schedule multiplies by the number of context-parallel ranks
        optimizer.passed()
        self._draw()

        def step(micro: Tree) -> tuple[Tensor, Callable[..., Any]]:
            loss = loss_of(trained, micro)
            return loss, lambda out: (out * factor, {"loss": out.detach()})

        losses = self._schedule(trained, micros, step, forward_only=False)
        mine = torch.stack([one["loss"].float() for one in losses]).mean() if trained.built.last else None
        return _from_last(mine, self._pp, self._ctx.device)

    def _evaluate(self, model: MegatronModel, given: Given) -> Any:  # Any: an output of transformers
        """Return the output of the whole model on every stage. Ranks: every rank of the pipeline."""
        if torch.is_grad_enabled():
            raise StepError(
                f"the model was called with gradients enabled, but its layers are on {self._pp.size} pipeline ranks, and a backward "
                "would end at the stage's first layer. Train with accelerator.forward_backward(model, batch, loss_of), and call the "
                "model under torch.no_grad()."
            )

        def step(given: Given) -> tuple[Tensor, Callable[..., Any]]:
            out: Any = model.run(given)
            return out.logits, lambda _, non_loss_data: out

        outputs = self._schedule(model, [given], step, forward_only=True)
        result = outputs[0] if model.built.last else None
        assert isinstance(self._pp, ProcessGroupComm), "a pipeline has several ranks"
        return share(result, self._pp, self._pp.size - 1)

    def _schedule(
        self, model: MegatronModel, micros: Sequence[Any], step: Callable[[Any], Any], forward_only: bool
    ) -> list[Any]:  # Any: values that the engine collects on the last stage
        """Run micro-batches through megatron-core's schedule. Ranks: every rank."""

        def forward_step(iterator: Iterator[Any], _: nn.Module) -> tuple[Tensor, Callable[..., Any] | None]:
            try:
                return step(next(iterator))  # type: ignore[no-any-return]
            except StageOutput as reached:
                return reached.hidden, None

        tokens = _tokens(micros[0])
        run = package("pipeline_parallel").get_forward_backward_func()
        model.in_schedule = True
        try:
            with hushed():
                found = run(
                    forward_step_func=forward_step,
                    data_iterator=iter(micros),
                    model=[model.engine],
                    num_microbatches=len(micros),
                    seq_length=tokens.shape[1],
                    micro_batch_size=tokens.shape[0],
                    forward_only=forward_only,
                    collect_non_loss_data=forward_only,
                )
        finally:
            model.in_schedule = False
        return list(found)

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        model, optimizer = self._trained()
        if norm_type != 2.0:
            raise StepError(
                f"clip_grad_norm_(norm_type={norm_type}) is not supported under megatron, whose engine computes the 2-norm over its "
                "ranks; remove norm_type."
            )
        held, wanted = {id(p) for p in model.held.values()}, {id(p) for p in parameters}
        if held != wanted:
            raise StepError(
                f"clip_grad_norm_() got {len(wanted)} parameters, but this rank's part of the model has {len(held)}; the engine clips "
                "by the norm of all trainable parameters. Pass model.parameters()."
            )
        return optimizer.clip(max_norm)

    def clip_value(self, parameters: Sequence[Tensor], limit: float) -> None:
        raise StepError(
            "clip_grad_value_() is not supported under megatron, whose gradients cannot be clamped separately; use clip_grad_norm_()."
        )

    # -- the user's module ----------------------------------------------------------------------------------------
    def unwrap(self, model: nn.Module, keep_precision: bool = True, keep_compile: bool = True) -> nn.Module:
        return model if keep_precision or model is self.model else self._convert.undo(model)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:  # Any: tensors and extra state
        if not isinstance(model, MegatronModel):
            return dict(self.unwrap(model).state_dict())
        found: dict[str, Tensor] = {}
        for name, parameter in model.held.items():
            found |= dict(whole_weights(model, name, parameter))
        if self._pp.size > 1:
            assert isinstance(self._pp, ProcessGroupComm), "a pipeline has several ranks"
            for stage in range(self._pp.size):
                found |= share(dict(found) if stage == self._pp.rank else None, self._pp, stage)
        return to_hub(model.entries.values(), {name: tensor.cpu() for name, tensor in found.items()}, model.facts)

    @contextmanager
    def whole_weights(self, model: nn.Module) -> Iterator[None]:
        if not isinstance(model, MegatronModel) or self.optimizer is None:
            yield
            return
        hub = {name: value.clone() for name, value in self.full_state_dict(model).items()}
        model.hub = hub
        try:
            yield
        finally:
            model.hub = None
        model.fill(hub)
        self.optimizer.reload()

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        if isinstance(model, MegatronModel):
            raise PrepareError(
                f"{name!r} cannot be marked under megatron: the engine only runs its layers in the model's forward. Call the model."
            )

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        raise StepError(
            "join_uneven_inputs() is not supported under megatron: every rank must take part in every collective. Use "
            "even_batches=True (the default), which gives every rank the same number of batches."
        )

    # -- for checkpoints ------------------------------------------------------------------------------------------
    def drop_gradients(self, model: nn.Module) -> None:
        drop_gradients(model)


def _facts_of(module: Any) -> ModelFacts:  # Any: a model of transformers
    """Return the sizes and options of the model. Raises: PrepareError for a model that the engine does not support."""
    config = getattr(module, "config", None)
    model_facts(config)  # raises for unknown architectures, before the modules are inspected
    words, head = module.get_input_embeddings(), module.get_output_embeddings()
    facts = model_facts(config, None if head is None else head.weight is words.weight)
    check_class([kind.__name__ for kind in type(module).__mro__], facts)
    return facts


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate meta tensors on the ranks that hold no values; the values come from rank 0 afterwards."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]


def _tokens(micro: Any) -> Tensor:  # Any: a micro-batch of the user
    """Return the token ids of a micro-batch: `input_ids`, or its first 2-D tensor."""
    given = micro.get("input_ids") if isinstance(micro, Mapping) else None
    for tensor in (given, *trees.tensors(micro)):
        if isinstance(tensor, Tensor) and tensor.ndim == 2:
            return tensor
    raise StepError(
        "a batch has no tensor of shape (samples, tokens), so pipeline stages cannot allocate their buffers; add input_ids to the batch."
    )


def _from_last(value: Tensor | None, pipeline: Comm, device: torch.device) -> Tensor:
    mine = torch.zeros((), device=device) if value is None else value
    return pipeline.broadcast(mine, pipeline.size - 1) if pipeline.size > 1 else mine


STRATEGY: Final = OfferedStrategy(create=MegatronStrategy)
