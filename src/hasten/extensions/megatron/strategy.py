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
from hasten.extensions.megatron.call import CallTensors
from hasten.extensions.megatron.config import make_engine_settings
from hasten.extensions.megatron.families import ModelFacts, check_class, model_facts
from hasten.extensions.megatron.model import Calls, MegatronModel, StageOutput
from hasten.extensions.megatron.optimizer import MegatronOptimizer
from hasten.extensions.megatron.package import (
    hide_engine_warnings,
    import_megatron,
    own_ranks,
)
from hasten.extensions.megatron.settings import MegatronLMPlugin
from hasten.extensions.megatron.weights import shard_of_whole, to_hub, unpadded_shard
from hasten.modules.names import StagePart
from hasten.optim.engine import list_parameters
from hasten.optim.gradients import drop_gradients
from hasten.optim.window import backpropagate
from hasten.precision.base import Precision
from hasten.prepare_args import Item, PrepareArguments
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import LOSS, Axis
from hasten.strategies.base import Caps, OfferedStrategy, PrepareRequest, Weigh
from hasten.strategies.context.ops import gather_parts
from hasten.strategies.micro_batches import broadcast_output, check_rows
from hasten.strategies.native import Convert, PlaceOnDevice, make_optimizers
from hasten.strategies.weight_sources import WeightSource, copy_from_rank_0, source_of
from hasten.trees import Tree


def gather_whole(model: MegatronModel, parameter: Tensor) -> Tensor:
    """Return the whole tensor of a parameter. Ranks: every rank of a stage."""
    location = model.place_of(parameter)
    if not model.is_split(parameter):
        return unpadded_shard(parameter.detach(), location)
    group = import_megatron("parallel_state").get_tensor_model_parallel_group()
    whole_tensor = torch.empty(
        location.shape, dtype=parameter.dtype, device=parameter.device
    )
    for rank, rank_shard in enumerate(gather_parts(parameter.detach(), group)):
        rank_location = model.place_of(parameter, rank)
        shard_of_whole(whole_tensor, rank_location).copy_(
            unpadded_shard(rank_shard, rank_location)
        )
    return whole_tensor


def find_trained_model(
    models: list[Item], optimizers: list[Item], is_trained_already: bool
) -> Item | None:
    """Return the model to train. Raises: PrepareError unless there is one optimizer for one model."""
    if not optimizers:
        return None
    optimized_ids: set[int] = set()
    for item in optimizers:
        optimized_ids.update(map(id, list_parameters(item.value.param_groups)))
    trained_models = [
        item for item in models if optimized_ids & set(map(id, item.value.parameters()))
    ]
    if len(trained_models) != 1 or len(optimizers) != 1 or is_trained_already:
        if is_trained_already:
            reason = ", after another one"
        else:
            reason = ""
        raise PrepareError(
            f"{len(optimizers)} optimizers with parameters of {len(trained_models)} models were prepared"
            f"{reason}; an engine trains one model with one optimizer. Prepare one model together "
            "with an optimizer over its parameters."
        )
    return trained_models[0]


def groups_by_name(module: nn.Module, optimizer: Optimizer) -> dict[str, int | None]:
    """Return the optimizer's group of each tensor of the Hub layout; None for a frozen one.

    Raises: PrepareError for a trainable parameter that is in no group.
    """
    group_of_parameter = {}
    for group_index, parameter_group in enumerate(optimizer.param_groups):
        for parameter in parameter_group["params"]:
            group_of_parameter[id(parameter)] = group_index
    group_of_name: dict[str, int | None] = {}
    for parameter_name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and id(parameter) not in group_of_parameter:
            raise PrepareError(
                f"{parameter_name} requires gradients, but is not in the optimizer; the engine clips and updates all trainable parameters. Add it to "
                "the optimizer, or call requires_grad_(False) on it."
            )
        group_of_name[parameter_name] = (
            group_of_parameter.get(id(parameter)) if parameter.requires_grad else None
        )
    return group_of_name


def bind_optimizer(
    optimizer: Optimizer, model: MegatronModel, groups: Mapping[str, int | None]
) -> None:
    """Put this rank's parameters into the optimizer's groups of the tensors they were made from."""
    parameters_by_group: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    for parameter_name, parameter in model.held.items():
        hub_groups = set()
        for hub_name in model.entries[parameter_name].hub:
            if hub_name in groups:
                hub_groups.add(groups[hub_name])
        if len(hub_groups) != 1:
            raise PrepareError(
                f"{', '.join(model.entries[parameter_name].hub)} are one tensor in the engine, but are in different parameter groups (or only "
                "some are frozen); put them into one group."
            )
        if (group_index := hub_groups.pop()) is None:
            raise PrepareError(
                f"{model.entries[parameter_name].hub[0]} is frozen, but the engine needs gradients for every parameter of the model; train all "
                "parameters, or use strategy='fsdp'."
            )
        parameters_by_group[group_index].append(parameter)
    for param_group, group_parameters in zip(
        optimizer.param_groups, parameters_by_group, strict=True
    ):
        param_group["params"] = group_parameters


LossOf = Callable[[nn.Module, Tree], Tensor]


class MegatronStrategy:
    """Strategy that trains one language model on an engine; models without an optimizer are placed and left whole."""

    name = "megatron"

    def __init__(self, config: Config, ctx: ProcessContext) -> None:
        import_megatron()
        megatron_engine.refuse_other_devices(ctx)
        for name, is_set in (
            (
                "gradient_accumulation.sync_each_batch",
                config.gradient_accumulation.sync_each_batch,
            ),
            ("dynamo.backend", config.dynamo.backend != "no"),
            ("recompute", bool(config.recompute)),
        ):
            if is_set:
                raise ConfigError(
                    f"{name} is not supported with strategy='megatron', whose engine manages layers and gradients itself; remove it (to "
                    "recompute, set megatron.recompute_activations)."
                )
        plugin = config.section(MegatronLMPlugin)
        self._config = config
        self._plugin = plugin
        self._ctx = ctx
        self._place = PlaceOnDevice()
        self._convert = Convert(config.master_weights)
        self.caps = Caps(
            owns_precision=True,
            sharded_state=True,
            synchronises=False,
            hides_gradients=True,
        )
        self.model: MegatronModel | None = None
        self.optimizer: MegatronOptimizer | None = None
        self._user_optimizer: Optimizer | None = None
        self._pp = ctx.groups(Axis.PP)

    # -- preparing ------------------------------------------------------------------------------------------------
    def building(self, ctx: ProcessContext) -> AbstractContextManager[None]:
        return nullcontext()  # prepare() shards models

    def prepare(
        self,
        bundle: PrepareArguments,
        ctx: ProcessContext,
        precision: Precision,
        train: bool = True,
    ) -> None:
        models = bundle.of("model")
        optimizers = bundle.of("optimizer")
        make_optimizers(optimizers, [item.value for item in models])
        trained_model = None
        if train:
            trained_model = find_trained_model(
                models, optimizers, self.model is not None
            )
        for item in models:
            if item is trained_model:
                self._start_engine(item, optimizers[0])
                continue
            request = PrepareRequest(place=item.place, train=False)
            placed_model = self._place.apply(item.value, request, ctx, precision)
            item.value = self._convert.apply(placed_model, request, ctx, precision)
        for item in bundle.of("scheduler"):
            if (
                self._user_optimizer is not None
                and getattr(item.value, "optimizer", None) is self._user_optimizer
            ):
                item.value.optimizer = self.optimizer

    def _start_engine(self, item: Item, optimizer: Item) -> None:
        user_optimizer: Optimizer = optimizer.value
        module: Any = item.value  # Any: a model of transformers
        if user_optimizer.state:
            raise PrepareError(
                f"{type(user_optimizer).__name__} has state of earlier steps, which would be lost when the engine creates its parameters. "
                "Prepare a new optimizer, and load the state with load_state()."
            )
        facts = _facts_of(module)
        engine_arguments = make_engine_settings(
            self._plugin, facts, self._config.mixed_precision
        )
        group_of_name = groups_by_name(module, user_optimizer)
        source = source_of(module, self._config.fsdp, self._ctx, buffers=False)
        if source is WeightSource.RANK_0:
            _allocate_meta_tensors(module, self._ctx.device)
        if source is not WeightSource.NO_RANK:
            copy_from_rank_0(module, self._ctx)
        megatron_engine.create_groups(self._plugin, self._ctx)
        seed = int(self._ctx.world.broadcast_object(torch.initial_seed() % 2**31))
        shares_state = self._plugin.use_distributed_optimizer
        built_engine = megatron_engine.build_engine(
            engine_arguments, facts, source is WeightSource.NO_RANK, seed, shares_state
        )
        calls = Calls(self._evaluate_model, self._seed_batch)
        model = MegatronModel(
            built_engine, facts, module.config, own_ranks(), self._plugin, calls
        )
        if source is not WeightSource.NO_RANK:
            model.fill_shards(dict(module.state_dict()))
        bind_optimizer(user_optimizer, model, group_of_name)
        self._declare_other_stages(model)
        model.train(module.training)
        self.model = model
        self._user_optimizer = user_optimizer
        self.optimizer = MegatronOptimizer(
            model, user_optimizer, self._plugin.gradient_clipping, seed, shares_state
        )
        item.value = model
        optimizer.value = self.optimizer

    def _declare_other_stages(self, model: MegatronModel) -> None:
        """Declare the parameters of other pipeline stages to checkpoints. Ranks: every rank."""
        if self._pp.size == 1:
            return
        names_by_stage: list[list[str]] = self._pp.all_gather_object(list(model.held))
        earlier_names = {
            name for names in names_by_stage[: self._pp.rank] for name in names
        }
        model.stage_part = StagePart(
            state_keys=tuple(model.entries),
            parameters=frozenset(model.entries),
            own_keys=frozenset(model.held) - earlier_names,
            copies=frozenset(model.held) & earlier_names,
        )

    # -- one step -------------------------------------------------------------------------------------------------
    def _seed_batch(self) -> None:
        """Seed the random numbers of a batch from the run's seed and the number of batches, so no other state is saved."""
        model, optimizer = self._trained_pair()
        config = model.built.config
        if (
            not (config.hidden_dropout or config.attention_dropout)
            or not model.training
        ):
            return
        seed, batch_number = optimizer.draws
        optimizer.draws[1] += 1
        rank_coordinates = self._ctx.mesh.index(self._ctx.rank, *LOSS), self._pp.rank
        digest = hashlib.sha256(
            f"{seed}/{batch_number}/{rank_coordinates}".encode()
        ).digest()
        random_module = import_megatron("tensor_parallel.random")
        random_module.model_parallel_cuda_manual_seed(
            int.from_bytes(digest[:5], "little"), force_reset_rng=True
        )

    def _trained_pair(self) -> tuple[MegatronModel, MegatronOptimizer]:
        if self.model is None or self.optimizer is None:
            raise StepError(
                "backward() was called before a model was prepared together with its optimizer, so there is nothing to train; call "
                "prepare(model, optimizer) first."
            )
        return self.model, self.optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()  # gradients are reduced at the window's end

    # Any: torch's keywords
    def backward(self, loss: Tensor, parts: int = 1, **kwargs: Any) -> None:
        if self._pp.size > 1:
            raise StepError(
                "accelerator.backward() cannot reach the layers that are on other pipeline ranks (megatron.pp_degree > 1). Replace the "
                "forward and the backward of the loop by loss = accelerator.forward_backward(model, batch, loss_of), where "
                "loss_of takes the model and a batch and returns the loss."
            )
        self._trained_pair()[1].count_pass()
        with hide_engine_warnings():
            backpropagate(loss, parts, **kwargs)

    def forward_backward(
        self,
        model: nn.Module,
        batch: Tree,
        loss_of: LossOf,
        weigh: Weigh,
        weight: Callable[[Tree], float | Tensor] | None = None,
    ) -> Tensor:
        trained_model, optimizer = self._trained_pair()
        if weight is not None:
            raise StepError(
                "forward_backward(weight=...) is not supported under Megatron-LM, whose schedule gives all micro-batches the same "
                "weight. Remove weight and use batches with equal numbers of labels, or strategy='auto' with pp_size."
            )
        if model is not trained_model:
            raise StepError(
                f"forward_backward() was called with a {type(model).__name__} that was not prepared with an optimizer; pass the model "
                "that prepare() returned."
            )
        num_micro_batches = self._plugin.num_micro_batches
        micro_batch_size = check_rows(trees.batch_size(batch), num_micro_batches)
        micro_batches = []
        for index in range(num_micro_batches):
            micro_batches.append(
                trees.slice_rows(
                    batch,
                    slice(index * micro_batch_size, (index + 1) * micro_batch_size),
                    micro_batch_size * num_micro_batches,
                )
            )
        loss_factor = weigh(torch.ones((), device=self._ctx.device))
        optimizer.count_pass()
        self._seed_batch()

        def forward_step(micro_batch: Tree) -> tuple[Tensor, Callable[..., Any]]:
            loss = loss_of(trained_model, micro_batch)
            return loss, lambda loss_output: (
                loss_output * loss_factor,
                {"loss": loss_output.detach()},
            )

        losses = self._run_schedule(
            trained_model, micro_batches, forward_step, forward_only=False
        )
        stage_loss = None
        if trained_model.built.last:
            stage_loss = torch.stack(
                [loss_values["loss"].float() for loss_values in losses]
            ).mean()
        return _broadcast_from_last_stage(stage_loss, self._pp, self._ctx.device)

    # Any: an output of transformers
    def _evaluate_model(self, model: MegatronModel, tensors: CallTensors) -> Any:
        """Return the output of the whole model on every stage. Ranks: every rank of the pipeline."""
        if torch.is_grad_enabled():
            raise StepError(
                f"the model was called with gradients enabled, but its layers are on {self._pp.size} pipeline ranks, and a backward "
                "would end at the stage's first layer. Train with accelerator.forward_backward(model, batch, loss_of), and call the "
                "model under torch.no_grad()."
            )

        def forward_step(tensors: CallTensors) -> tuple[Tensor, Callable[..., Any]]:
            model_output: Any = model.run_layers(tensors)
            return model_output.logits, lambda _, non_loss_data: model_output

        outputs = self._run_schedule(model, [tensors], forward_step, forward_only=True)
        last_output = outputs[0] if model.built.last else None
        assert isinstance(self._pp, ProcessGroupComm), "a pipeline has several ranks"
        return broadcast_output(last_output, self._pp, self._pp.size - 1)

    def _run_schedule(
        self,
        model: MegatronModel,
        micro_batches: Sequence[Any],
        run_micro_batch: Callable[[Any], Any],
        forward_only: bool,
    ) -> list[Any]:  # Any: values that the engine collects on the last stage
        """Run micro-batches through megatron-core's schedule. Ranks: every rank."""

        def forward_step(
            iterator: Iterator[Any], _: nn.Module
        ) -> tuple[Tensor, Callable[..., Any] | None]:
            try:
                return run_micro_batch(next(iterator))  # type: ignore[no-any-return]
            except StageOutput as stage_output:
                return stage_output.hidden, None

        tokens = _token_ids_of(micro_batches[0])
        run_schedule = import_megatron("pipeline_parallel").get_forward_backward_func()
        model.in_schedule = True
        try:
            with hide_engine_warnings():
                last_stage_values = run_schedule(
                    forward_step_func=forward_step,
                    data_iterator=iter(micro_batches),
                    model=[model.engine],
                    num_microbatches=len(micro_batches),
                    seq_length=tokens.shape[1],
                    micro_batch_size=tokens.shape[0],
                    forward_only=forward_only,
                    collect_non_loss_data=forward_only,
                )
        finally:
            model.in_schedule = False
        return list(last_stage_values)

    def clip_norm(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        model, optimizer = self._trained_pair()
        if norm_type != 2.0:
            raise StepError(
                f"clip_grad_norm_(norm_type={norm_type}) is not supported under megatron, whose engine computes the 2-norm over its "
                "ranks; remove norm_type."
            )
        local_ids = set(map(id, model.held.values()))
        clipped_ids = set(map(id, parameters))
        if local_ids != clipped_ids:
            raise StepError(
                f"clip_grad_norm_() got {len(clipped_ids)} parameters, but this rank's part of the model has {len(local_ids)}; the engine clips "
                "by the norm of all trainable parameters. Pass model.parameters()."
            )
        return optimizer.clip(max_norm)

    def clip_value(self, parameters: Sequence[Tensor], limit: float) -> None:
        raise StepError(
            "clip_grad_value_() is not supported under megatron, whose gradients cannot be clamped separately; use clip_grad_norm_()."
        )

    # -- the user's module ----------------------------------------------------------------------------------------
    def unwrap(
        self, model: nn.Module, keep_precision: bool = True, keep_compile: bool = True
    ) -> nn.Module:
        if keep_precision or model is self.model:
            return model
        return self._convert.undo(model)

    # Any: tensors and extra state
    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        if not isinstance(model, MegatronModel):
            return dict(self.unwrap(model).state_dict())
        whole_tensors = {}
        for parameter_name, parameter in model.held.items():
            whole_tensors[parameter_name] = gather_whole(model, parameter)
        if self._pp.size > 1:
            assert isinstance(self._pp, ProcessGroupComm), (
                "a pipeline has several ranks"
            )
            for stage in range(self._pp.size):
                whole_tensors |= broadcast_output(
                    dict(whole_tensors) if stage == self._pp.rank else None,
                    self._pp,
                    stage,
                )
        host_tensors = {}
        for parameter_name, tensor in whole_tensors.items():
            host_tensors[parameter_name] = tensor.cpu()
        return to_hub(
            model.entries.values(),
            host_tensors,
            model.facts,
        )

    @contextmanager
    def whole_weights(self, model: nn.Module) -> Iterator[None]:
        if not isinstance(model, MegatronModel) or self.optimizer is None:
            yield
            return
        hub_weights = {}
        for weight_name, tensor in self.full_state_dict(model).items():
            hub_weights[weight_name] = tensor.clone()
        model.hub = hub_weights
        try:
            yield
        finally:
            model.hub = None
        model.fill_shards(hub_weights)
        self.optimizer.reload_masters()

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
    # raises for unknown architectures, before the modules are inspected
    model_facts(config)
    word_embeddings = module.get_input_embeddings()
    output_head = module.get_output_embeddings()
    facts = model_facts(
        config,
        None if output_head is None else output_head.weight is word_embeddings.weight,
    )
    check_class([base_class.__name__ for base_class in type(module).__mro__], facts)
    return facts


def _allocate_meta_tensors(module: nn.Module, device: torch.device) -> None:
    """Allocate meta tensors on the ranks that hold no values; the values come from rank 0 afterwards."""
    module._apply(
        lambda tensor: (
            torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        )
    )  # type: ignore[no-untyped-call]


def _token_ids_of(micro_batch: Any) -> Tensor:  # Any: a micro-batch of the user
    """Return the token ids of a micro-batch: `input_ids`, or its first 2-D tensor."""
    input_ids = None
    if isinstance(micro_batch, Mapping):
        input_ids = micro_batch.get("input_ids")
    for tensor in (input_ids, *trees.tensors(micro_batch)):
        if isinstance(tensor, Tensor) and tensor.ndim == 2:
            return tensor
    raise StepError(
        "a batch has no tensor of shape (samples, tokens), so pipeline stages cannot allocate their buffers; add input_ids to the batch."
    )


def _broadcast_from_last_stage(
    value: Tensor | None, pipeline: Comm, device: torch.device
) -> Tensor:
    local_value = torch.zeros((), device=device) if value is None else value
    if pipeline.size > 1:
        return pipeline.broadcast(local_value, pipeline.size - 1)
    return local_value


STRATEGY: Final = OfferedStrategy(create=MegatronStrategy)
