"""The Accelerator with the established constructor and attributes, on top of hasten's."""

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import hasten
from accelerate._impl import ambient
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.checkpoints.saving import SavingFace
from accelerate._impl.constructing import HANDLERS, UNSET, Arguments, sort_arguments
from accelerate._impl.enums import DistributedType
from accelerate._impl.environment.constants import PROFILE_PATTERN_NAME
from accelerate._impl.loaders.share import prepare_data_loader, skip_first_batches
from accelerate._impl.models.memory import release_memory
from accelerate._impl.models.other import (
    check_os_kernel,
    extract_model_from_parallel,
    wait_for_everyone,
)
from accelerate._impl.preparing import EstablishedPreparer, check_quantized, step_of
from accelerate._impl.settings.kwargs_handlers import AutocastKwargs, ProfileKwargs
from accelerate._impl.settings.parallelism import ParallelismConfig
from accelerate._impl.sharding.followed import FollowedPlugin, FollowedSections
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from accelerate._impl.surface.shown import shown_property
from accelerate._impl.tensors import gather, gather_object, pad_across_processes, reduce
from accelerate._impl.trackers import GeneralTracker, begin, filter_trackers
from accelerate._impl.views.logging import get_logger
from accelerate._impl.views.state import (
    AcceleratorState,
    GradientState,
    fill_partial,
    fill_whole,
)
from hasten import trees
from hasten.accelerator.step import Accumulation
from hasten.comm import ops
from hasten.config.base import given as named
from hasten.modules.names import local_tensor
from hasten.optim import clip
from hasten.optim.scheduler import PreparedScheduler
from hasten.runtime.mesh import device_mesh
from hasten.runtime.mesh_plan import Axis
from hasten.trust.numbers.numbers import NumbersWatch

_split_batches = UNSET  # as the original names it
logger = get_logger("accelerate.accelerator")
fsdp = Deferred("accelerate._impl.checkpoints.fsdp")
modeling = Deferred("accelerate._impl.models.modeling")
sequences = Deferred("accelerate._impl.sharding.sequences")
# Any in this file: the user's objects, and settings of every type.


class Accelerator(SavingFace):
    """Runs a plain training loop on any number of processes and devices."""

    _preparer: EstablishedPreparer
    profile_handler: ProfileKwargs | None
    _divides_sequences = False
    _cp_context: Callable[..., AbstractContextManager[Any]]
    _placement: Any = ()
    autocast_handler: AutocastKwargs | None
    # set below: those that run on this process, users' own classes among them
    trackers: Any = ()

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = UNSET,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Any = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Any = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        arguments = dict(locals())
        for name in ("self", "__class__"):
            arguments.pop(name, None)
        self._given = arguments
        sorted_ = sort_arguments(arguments)
        hasten.Accelerator.__init__(self, **sorted_.settings)
        self._show_arguments(sorted_, arguments)
        self._preparer = EstablishedPreparer(self)
        self._sharding = FollowedPlugin(self, sorted_.fsdp)
        self._engine = FollowedSections(self, sorted_.deepspeed)
        self._publish_views(sorted_, arguments)
        if parallelism_config is not None:
            parallelism_config._validate_accelerator(self)

    def _show_arguments(self, sorted_: Arguments, arguments: dict[str, Any]) -> None:
        """Keep what was given where scripts look for it."""
        self.device_placement = arguments["device_placement"]
        self.dataloader_config = sorted_.data
        self.project_configuration = sorted_.project
        self.step_scheduler_with_optimizer = arguments["step_scheduler_with_optimizer"]
        self.step = 0
        if arguments["rng_types"] is not None:
            self.rng_types = arguments["rng_types"]
        else:
            self.rng_types = ["generator"]
        vars(self).update(
            {
                handler_name: sorted_.handlers.get(handler_name)
                for handler_name in HANDLERS.values()
            }
        )
        # for inference: an error when they are trained
        self._precision.takes_half_weights = True
        self.delayed_fp8_autocast = False
        self.trackers = []
        if named(self.config.trust).isdisjoint(("numbers", "numbers_spike")):
            for run_part in self._clock.parts.members:  # quirk: NAN_IS_SILENT
                if isinstance(run_part, NumbersWatch):
                    self._clock.parts.remove(run_part)

    def __copy__(self) -> Self:
        """Another Accelerator over the same run: process groups, clocks and what was prepared exist once."""
        accelerator_copy = type(self).__new__(type(self))
        # to which the preparer belongs
        accelerator_copy.__dict__.update(self.__dict__, copied_from=self)
        return accelerator_copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this Accelerator itself, and say so."""
        logger.info(message("deep_copy"))
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return an Accelerator with the same arguments and prepared loaders over the processes that read the pickle."""
        arguments = {}
        for argument_name, argument_value in self._given.items():
            if argument_value is not UNSET:
                arguments[argument_name] = argument_value
        return (
            partial(type(self), **arguments),
            (),
            {"loaders": list(self._prepared.loaders)},
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._prepared.loaders.extend(state["loaders"])

    def _publish_views(self, sorted_: Arguments, arguments: dict[str, Any]) -> None:
        """Make this Accelerator what the process-wide views show."""
        ambient.adopt_context(self.ctx)
        self.process = ambient.process()
        AMBIENT.clock = self._clock
        self._clock.full_divisor = True  # quirk: SHORT_WINDOW_FULL_DIVISOR
        self._clock.checks_models = False
        # a save stores what there is at that moment, as the original's does
        self._clock.read_position = None
        fill_partial(self.config.cpu, strategy=self._strategy.name)
        sizes = arguments["parallelism_config"] or ParallelismConfig.launched(
            self.config.parallelism, self.ctx.mesh
        )
        if sizes is not None and sizes.sp_enabled:
            handler = sizes.sp_handler
        else:
            handler = None
        self._sequences = handler and sequences.SplitSequences(self, handler)
        plugins = {
            "torch_tp_plugin": arguments["torch_tp_plugin"],
            "parallelism_config": sizes,
        }
        plugins |= {
            "deepspeed_plugins": self._engine.plugins,
            "dynamo_plugin": sorted_.dynamo,
        }
        fill_whole(self.config.mixed_precision, self._sharding.plugin, **plugins)
        self.state = AcceleratorState()
        self.gradient_state = GradientState(sorted_.accumulation)
        self.gradient_state.plugin_kwargs.setdefault("num_steps", self._clock.every)
        check_os_kernel()
        self.log_with = filter_trackers(arguments["log_with"], self.logging_dir)
        if arguments["log_with"] is not None and not self.log_with:
            warnings.warn(message("no_trackers", arguments["log_with"]), stacklevel=3)

    # -- preparing ------------------------------------------------------------------------------------------------
    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Models, optimizers, schedulers and loaders ready for this run, in the order given; the rest as it is."""
        is_spread = any(
            self.verify_device_map(model)
            for model in args
            if isinstance(model, nn.Module)
        )
        if is_spread and self.distributed_type != DistributedType.NO:
            raise ValueError(message("map_on_several"))
        if device_placement is not None and len(device_placement) != len(args):
            raise ValueError(message("placement_of_each", len(args)))
        models = [] if self._sequences is None else self._sequences.attach(args)
        prepared = self._prepare_all(args, device_placement)
        if self._sequences is not None and models:
            self._sequences.join(prepared)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_all(self, args: tuple[Any, ...], placement: Any) -> tuple[Any, ...]:
        """Prepare by the methods that clients override and replace, in the original's order."""
        if self.ctx.mesh.size(Axis.CP) > 1:
            args = tuple(self._prepare_cp(*args))
        if self.ctx.mesh.size(Axis.TP) > 1:
            args = tuple(self._prepare_tp(*args))
        if placement is None:
            self._placement = [None] * len(args)
        else:
            self._placement = list(placement)
        if self.distributed_type == DistributedType.DEEPSPEED:
            return self._prepare_deepspeed(*args)
        if self.is_fsdp2:
            return self._prepare_fsdp2(*args)
        return self._prepare_each(*args)

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Allow maybe_context_parallel() to divide sequences; a client that divides them itself replaces this method."""
        self._divides_sequences = True
        return args

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:
        return args

    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        return self._prepare_each(*args, engine=True)

    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        replaced = vars(sys.modules.get("accelerate.accelerator", sys)).get(
            "fsdp2_prepare_model"
        )
        if replaced is None or replaced is fsdp.fsdp2_prepare_model:
            return self._prepare_each(*args)
        # starts the group of a process that is alone
        device_mesh(self.ctx.mesh, self.ctx.device)
        return self._preparer.prepare_sharded_by(partial(replaced, self), args)

    def _prepare_each(self, *args: Any, engine: bool = False) -> tuple[Any, ...]:
        """Prepare together what no subclass and no patch has a method of its own for, and the others by these methods."""
        placements = dict(zip(map(id, args), self._placement, strict=False))
        own_steps = [self._has_own_step(value, engine) for value in args]
        optimizers = [
            value for value in args if isinstance(value, torch.optim.Optimizer)
        ]
        prepared = list(args)
        joint_indices = []
        for argument_index, value in enumerate(args):
            if not own_steps[argument_index]:
                joint_indices.append(argument_index)
                continue
            prepare = partial(
                self._prepare_one,
                first_pass=True,
                device_placement=placements.get(id(value)),
            )
            if self.is_fsdp2 and isinstance(value, nn.Module):
                prepared[argument_index] = self._preparer.with_renewed_optimizers(
                    prepare, value, optimizers
                )
            else:
                prepared[argument_index] = prepare(value)
        joint_arguments = tuple(args[index] for index in joint_indices)
        jointly_prepared = self._preparer.prepare(
            joint_arguments, [placements.get(id(value)) for value in joint_arguments]
        )
        for argument_index, value in zip(joint_indices, jointly_prepared, strict=True):
            prepared[argument_index] = value
        for argument_index, argument in enumerate(args):
            if own_steps[argument_index]:
                prepared[argument_index] = self._prepare_one(
                    prepared[argument_index],
                    device_placement=placements.get(id(argument)),
                )
        return tuple(prepared)

    def _has_own_step(self, value: Any, engine: bool) -> bool:
        """Return whether a subclass or a patch has replaced the method that prepares this object."""
        step = step_of(value)
        if step is None or (engine and step != "prepare_data_loader"):
            return False
        for step_name in ("_prepare_one", step):
            if (
                getattr(getattr(self, step_name), "__func__", None)
                is not _SHIPPED_STEPS[step_name]
            ):
                return True
        return False

    def _prepare_one(
        self, obj: Any, first_pass: bool = False, device_placement: bool | None = None
    ) -> Any:
        """Prepare one object by its method: schedulers in the second pass, all others in the first."""
        step = step_of(obj)
        if step is None or first_pass == (step == "prepare_scheduler"):
            return obj
        if step == "prepare_scheduler":
            return self.prepare_scheduler(obj)
        return getattr(self, step)(obj, device_placement=device_placement)

    def prepare_model(
        self,
        model: Any,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        check_quantized(model, self.device)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: Any, device_placement: bool | None = None
    ) -> Any:
        """Return the optimizer, updating where a window ends; its state lies where its parameters do."""
        return self._preparer.prepare((optimizer,), [device_placement])[0]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return the schedule, also of a class of one's own, following its optimizer's updates."""
        prepared = self._preparer.prepare((scheduler,))[0]
        if isinstance(prepared, PreparedScheduler):
            return prepared
        return self._preparer._prepare_scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        if device_placement is None:
            puts_on_device = self.device_placement
        else:
            puts_on_device = device_placement
        return self._preparer.loader(
            data_loader, puts_on_device, slice_fn=slice_fn_for_dispatch
        )

    def share_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        # the name of this module, which clients replace
        return prepare_data_loader(data_loader, *args, **options)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        return skip_first_batches(dataloader, num_batches=num_batches)

    # -- one step -------------------------------------------------------------------------------------------------
    def accumulate(self, *models: Any) -> Accumulation:  # type: ignore[override] # the original names no loader
        """Return one micro-step over these models; models that were not prepared take part without a window of their own."""
        self._check_others_have_batches()
        prepared_models = []
        for model in models:
            if any(model is prepared_model for prepared_model in self._prepared.models):
                prepared_models.append(model)
        sync_each_batch = self.config.gradient_accumulation.sync_each_batch
        if self.step != self._counted:  # the script has set it
            self._clock.begin_at(self.step % self._clock.every)
        ends_window = (
            self._clock.sync_with_dataloader and self.gradient_state.end_of_dataloader
        )
        self.step = self._counted = 0 if ends_window else self.step + 1
        return Accumulation(
            self._clock,
            self._strategy,
            tuple(prepared_models or self._prepared.models),
            sync_each_batch,
        )

    def _do_sync(self) -> None:
        """Count a micro-step outside of accumulate() and synchronise gradients where a window or loader ends."""
        ends_window: bool = (
            self._clock.sync_with_dataloader and self.gradient_state.end_of_dataloader
        )
        self.step = 0 if ends_window else self.step + 1
        self.gradient_state._set_sync_gradients(
            ends_window or self.step % self._clock.every == 0
        )

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Return a block in which backward leaves this model's gradients unsynchronised."""
        if any(model is prepared_model for prepared_model in self._prepared.models):
            return self._strategy.no_sync(model)
        if self.num_processes == 1 or not hasattr(model, "no_sync"):
            return nullcontext()
        context: AbstractContextManager[None] = model.no_sync()
        return context

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """A block whose backward synchronises gradients of forwards made under no_sync."""
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        sync_flags = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = (
                sync_flags
            )

    def backward(self, loss: Any, **kwargs: Any) -> None:  # type: ignore[override]  # weight is a keyword, if given
        self._check_others_have_batches()
        learning_rate = kwargs.pop("learning_rate", None)
        if self.has_lomo_optimizer:
            self.lomo_backward(loss, learning_rate)
        elif not isinstance(loss, torch.Tensor) and hasattr(loss, "backward"):
            (loss / self._clock.every).backward(**kwargs)
            return
        # the loss has been divided by the window's length already
        if not kwargs.pop("scale_wrt_gas", True):
            loss = loss * self._clock.every
        super().backward(loss, **kwargs)

    def _check_others_have_batches(self) -> None:
        """Raise before gradients are synchronised with a process that has no batch left, which gloo ends without words."""
        loader = self.gradient_state.active_dataloader
        if (
            loader is None
            or not getattr(loader, "outlasts_others", False)
            or self._clock.trains_separately
        ):
            return
        if all(
            getattr(model, "require_backward_grad_sync", True)
            for model in self._prepared.models
        ):
            raise RuntimeError(message("batch_of_one_process", self.process_index))

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float | None) -> None:
        if learning_rate is None:
            raise ValueError(
                "A learning rate must be passed in order to call backward pass with LOMO optimizers."
            )
        if not (fused_backwards := self._fused_backwards()):
            raise ValueError(message("lomo_without_backward"))
        for fused_backward in fused_backwards:
            fused_backward(loss, learning_rate)

    def _fused_backwards(self) -> list[Any]:
        return list(
            filter(
                None,
                (
                    getattr(optimizer.optimizer, "fused_backward", None)
                    for optimizer in self._prepared.optimizers
                ),
            )
        )

    has_lomo_optimizer = shown_property(
        lambda self: bool(self._fused_backwards()),
        "Whether an optimizer updates in backward.",
    )

    def autocast(
        self,
        autocast_handler: AutocastKwargs | None = None,  # type: ignore[override]  # this package's class
    ) -> AbstractContextManager[Any]:
        handler = autocast_handler or self.autocast_handler
        return super().autocast(None if handler is None else handler.to_hasten())

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip gradients to a global norm where the window ends; inside it, only tell the norm."""
        parameter_list = clip.as_list(parameters)
        norm = super().clip_grad_norm_(parameter_list, max_norm, float(norm_type))
        if norm is None:
            return self._clip_grad_norm_dtensor_aware(
                parameter_list, float("inf"), norm_type
            )
        return norm

    def _clip_grad_norm_dtensor_aware(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        return clip.clip_norm(clip.as_list(parameters), max_norm, float(norm_type))

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return the prepared loader, handing each process its part of the sequences of all that share them (`sp_size`)."""
        if self._sequences is None:
            raise ValueError(message("no_shared_sequences"))
        return self._sequences.split(dl)

    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a block in which processes may run out of batches at different times."""
        if self.num_processes == 1:
            return nullcontext()
        if not all(
            isinstance(joinable, nn.Module | torch.optim.Optimizer)
            for joinable in joinables
        ):
            warnings.warn(message("nothing_to_join"), stacklevel=2)
            return nullcontext()
        if even_batches is not None and any(
            isinstance(joinable.dataset, IterableDataset)
            for joinable in self._dataloaders
        ):
            warnings.warn(message("streams_stay_even"), stacklevel=2)
        return super().join_uneven_inputs(joinables, even_batches)

    wait_for_everyone = staticmethod(wait_for_everyone)

    # -- collectives ----------------------------------------------------------------------------------------------
    def gather(self, tensor: Any) -> Any:  # type: ignore[override]  # no axes here
        """Return every process's tensors joined along the first dimension."""
        return gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:  # type: ignore[override]  # other kinds
        """Tensors summed or averaged over processes; `scale` acts on TPUs only."""
        return reduce(tensor, reduction, scale)

    flag_tensor = shown_property(
        lambda self: torch.tensor(int(self.process._trigger._raised)),
        "The flag of set_trigger().",
    )

    def pad_across_processes(  # type: ignore[override]  # no axes here
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        return pad_across_processes(
            tensor, dim=dim, pad_index=pad_index, pad_first=pad_first
        )

    def gather_for_metrics(  # type: ignore[override] # the original names no loader
        self, input_data: Any, use_gather_object: bool = False
    ) -> Any:
        """Return the results of every process for the current batch; the last batch is cut to the samples that are left."""
        samples_left = self._samples_left()  # quirk: LAST_BATCH_IS_CUT
        if use_gather_object or not all(
            isinstance(leaf, torch.Tensor) for leaf in trees.leaves(input_data)
        ):
            gathered = gather_object(input_data)
            try:
                return gathered[:samples_left]
            except Exception:  # an object that cannot be sliced stays as it is
                return gathered
        is_single_process = self.num_processes == 1
        if is_single_process:
            gathered = self.gather(input_data)
        else:
            gathered = ops.gather_ragged(input_data, self.readers())
        if samples_left:
            return trees.map_tensors(
                lambda leaf: leaf[:samples_left] if leaf.ndim else leaf, gathered
            )
        return gathered

    def _samples_left(self) -> int | None:
        """Return the number of samples in a last batch that is cut to them; log where it is unknown."""
        loader = self.gradient_state.active_dataloader
        last = loader is not None and loader.end_of_dataloader
        if last and loader.remainder == -1:
            logger.info(message("no_length"))
        if last and loader.remainder > 0 and loader.even_batches:
            return int(loader.remainder)
        return None

    # -- trackers -------------------------------------------------------------------------------------------------
    def init_trackers(
        self, project_name: str, config: Any = None, init_kwargs: Any = None
    ) -> None:
        """Begin a run of every tracker. Ranks: every rank."""
        self.trackers += begin(
            self.log_with,
            project_name,
            config,
            dict(init_kwargs or {}),
            self.logging_dir,
        )

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker of this name, or its package's own object; a blank one away from the main process."""
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if self.trackers and self.is_main_process:
            raise ValueError(
                f"{name} is not an available tracker stored inside the `Accelerator`."
            )
        # quirk: MISSING_TRACKER_IS_BLANK
        return GeneralTracker(_blank=True)

    def log(self, values: Any, step: int | None = None, log_kwargs: Any = None) -> None:
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """Finish saves in flight and close the trackers. Ranks: every rank."""
        for tracker in self.trackers:
            tracker.finish()
        super().end_training()

    # -- models and memory ----------------------------------------------------------------------------------------
    def unwrap_model(
        self,
        model: Any,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> Any:
        """Return the user's own module inside a prepared one."""
        if any(model is prepared_model for prepared_model in self._prepared.models):
            model = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return every parameter and buffer of a model, whole. Ranks: every rank."""
        if any(map(modeling.has_offloaded_params, model.modules())):
            is_materialized = not any(
                weight_or_model.is_meta for weight_or_model in model.parameters()
            )
            if is_materialized:
                return model.state_dict()
            return modeling.get_state_dict_offloaded_model(model)
        if any(model is weight_or_model for weight_or_model in self._prepared.models):
            return OrderedDict(super().get_state_dict(model))
        return (self.unwrap_model(model) if unwrap else model).state_dict()

    def _get_named_parameters(
        self, *args: Any, drop_refs: bool = False
    ) -> dict[str, Any]:
        """Return the parameters of models by name, or their addresses."""
        parameters: dict[str, Any] = {}
        for value in args:
            if isinstance(value, nn.Module):
                parameters.update(extract_model_from_parallel(value).named_parameters())
        if drop_refs:
            for parameter_name, parameter in parameters.items():
                parameters[parameter_name] = local_tensor(parameter).data_ptr()
        return parameters

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:  # type: ignore[override]  # this package's class
        """A block under torch.profiler; with `output_trace_dir`, its trace is left there under PROFILE_PATTERN_NAME."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as running:
            yield running
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(
                str(folder / PROFILE_PATTERN_NAME.format(suffix=self.process_index))
            )

    def maybe_context_parallel(
        self,
        buffers: Any = None,
        buffer_seq_dims: Any = None,
        no_restore_buffers: Any = None,
    ) -> AbstractContextManager[Any]:
        """Return a block in which each buffer holds this process's part of its sequence; losses of processes weigh alike."""
        if "_cp_context" in vars(self):  # of a client's _prepare_cp
            region: AbstractContextManager[Any] = self._cp_context(
                buffers=buffers,
                buffer_seq_dims=buffer_seq_dims,
                no_restore_buffers=no_restore_buffers,
            )
            return region
        if self.ctx.mesh.size(Axis.CP) == 1 or not self._divides_sequences:
            logger.warning_once(message("no_context_parallelism"))
            return nullcontext()
        return self.context_parallel(
            buffers or (), buffer_seq_dims or (), None, no_restore_buffers or ()
        )

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything prepared and hand cached memory back; a None for every argument."""
        super().free_memory()
        self.step = 0
        return release_memory(*objects)  # quirk: FREE_MEMORY_GIVES_LIST

    clear = free_memory

    def verify_device_map(self, model: nn.Module) -> bool:
        for submodule in model.modules():
            if len(getattr(submodule, "hf_device_map", {})) > 1:
                return True
        return False


_STEPS = (
    "_prepare_one",
    "prepare_model",
    "prepare_optimizer",
    "prepare_scheduler",
    "prepare_data_loader",
)
_SHIPPED_STEPS = {name: vars(Accelerator)[name] for name in _STEPS}
