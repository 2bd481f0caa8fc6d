"""Table of the private or undocumented names of torch that hasten and its drop-in use, and the effect of their absence.

The tests fail if the installed torch lacks one, and if code uses one that is not listed here.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

TESTED_VERSIONS: Final = ("2.11", "2.13")
_DDP: Final = "torch.nn.parallel:DistributedDataParallel"
_GROUP: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
_PARAM: Final = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_STATE: Final = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState"
_SCALER: Final = "torch.amp:GradScaler"
_AGENT: Final = (
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
)
_MODULE: Final = "torch.nn:Module"

_BUCKETS: Final = "src/hasten/strategies/ddp/buckets.py"
_FSDP_STRATEGY: Final = "src/hasten/strategies/fsdp/strategy.py"
_SCALING: Final = "src/hasten/precision/scaler.py"
_LAUNCH: Final = "src/hasten/launch/elastic/torch_agent.py"
_SHARDS: Final = "src/hasten/strategies/sharded_updates.py"
_NAMES: Final = "src/hasten/modules/names.py"
_HOOKS: Final = "src/hasten/strategies/gradient_hooks.py"
_META: Final = "src/hasten/modules/meta.py"
_BLOCKS: Final = "src/hasten/extensions/bigmodel/units.py"
_COLLECTIVE_LOG: Final = "src/hasten/comm/collective_log.py"
_TAKEOVER: Final = "src/hasten/extensions/planning/plan/takeover.py"
_WATCH: Final = "src/hasten/extensions/planning/plan/watch.py"
_CLIP: Final = "src/hasten/optim/clip.py"
_UPDATE: Final = "src/hasten/extensions/offload/update.py"
_WEIGHTS: Final = "src/hasten/extensions/offload/weights.py"
_STREAMED: Final = "offload fails"
_HOSTS: Final = "src/hasten/extensions/xla/strategy.py"


@dataclass(frozen=True, slots=True)
class Name:
    """One name: its owner in torch ("module" or "module:Class"), the files that use it, and the effect of its absence."""

    owner: str
    name: str
    files: tuple[str, ...]
    without: str
    seen: tuple[str, ...] = TESTED_VERSIONS
    instead_of: str = ""
    """Name with the same meaning in other versions; one of the two is enough."""


_STALL: Final = "the stall report cannot count torch's own collectives"
_HOLDS: Final = "degrades: after load_state inside a window in the same process, its gradients count in the next"
_SCALE: Final = "fp16 fails"
_ELASTIC: Final = "the launcher fails"
_MEAN: Final = "several XLA hosts cannot average gradients"
_FAST: Final = "degrades: optimizers update DTensors, slower"

NAMES: Final = (
    # the watchdog: the number of collectives that each group has started
    Name("torch.distributed.distributed_c10d", "_world", (_COLLECTIVE_LOG,), _STALL),
    Name("torch.distributed:ProcessGroup", "_get_backend", (_COLLECTIVE_LOG,), _STALL),
    Name(
        "torch._C._distributed_c10d:Backend",
        "_get_sequence_number_for_group",
        (_COLLECTIVE_LOG,),
        _STALL,
    ),
    # DDP: the time of its exchange, and the order of its buckets
    Name(
        _DDP,
        "_get_ddp_logging_data",
        ("src/hasten/strategies/ddp/strategy.py",),
        "degrades: that time is unknown",
    ),
    Name(
        _DDP,
        "_ddp_params_and_buffers_to_ignore",
        ("src/hasten/strategies/ddp/strategy.py",),
        "quantized weights of torchao fail under DDP",
    ),
    Name(
        _DDP,
        "require_forward_param_sync",
        (_BUCKETS, "src/hasten/strategies/ddp/strategy.py"),
        "buffers may be synchronised once more",
    ),
    # several XLA hosts: the end of a backward pass
    Name("torch", "_C", (_HOSTS,), _MEAN),
    Name("torch._C", "_current_graph_task_id", (_HOSTS,), _MEAN),
    Name(
        "torch.autograd:Variable",
        "_execution_engine",
        (_HOSTS, _WEIGHTS),
        f"{_MEAN}; {_STREAMED}",
    ),
    # schedules that follow each other: the end of the last one
    Name(
        "torch.optim.lr_scheduler:SequentialLR",
        "_schedulers",
        ("src/hasten/optim/scheduler.py",),
        "schedules of several parts cannot be prepared",
    ),
    # offload: the hooks of an optimizer in their order
    Name("torch.optim:Optimizer", "_optimizer_step_post_hooks", (_UPDATE,), _STREAMED),
    # FSDP2: gradients held between reductions
    Name(
        "torch.distributed.fsdp:FSDPModule",
        "_get_fsdp_state",
        (_FSDP_STRATEGY,),
        _HOLDS,
    ),
    Name(
        _STATE,
        "_fsdp_param_groups",
        (_FSDP_STRATEGY,),
        _HOLDS,
        ("2.13",),
        instead_of="_fsdp_param_group",
    ),
    Name(
        _STATE,
        "_fsdp_param_group",
        (_FSDP_STRATEGY,),
        _HOLDS,
        instead_of="_fsdp_param_groups",
    ),
    Name(_GROUP, "fsdp_params", (_FSDP_STRATEGY,), _HOLDS),
    Name(_GROUP, "_partial_reduce_output", (_FSDP_STRATEGY,), _HOLDS),
    Name(_PARAM, "unsharded_accumulated_grad", (_FSDP_STRATEGY,), _HOLDS),
    Name(_PARAM, "_unsharded_param", (_FSDP_STRATEGY,), _HOLDS),
    # DTensor
    Name(
        "torch.distributed.tensor.debug",
        "_clear_sharding_prop_cache",
        ("src/hasten/runtime/mesh.py",),
        "a second process group in one process fails with sharded tensors",
    ),
    Name(
        "torch.distributed.device_mesh:DeviceMesh",
        "_get_root_mesh",
        ("src/hasten/checkpoint/format/formats.py",),
        "sharded checkpoints fail",
    ),
    Name(
        "torch.distributed.tensor._utils",
        "compute_local_shape_and_global_offset",
        ("src/hasten/checkpoint/format/formats.py",),
        "sharded checkpoints fail",
    ),
    Name(
        "torch.distributed.tensor:DTensor",
        "_local_tensor",
        (_SHARDS, _NAMES),
        "sharded updates fail",
    ),
    Name("torch.optim:Adam", "_init_group", (_SHARDS,), _FAST),
    # schedulers
    Name(
        "torch.optim.lr_scheduler:LRScheduler",
        "_wrapped_by_lr_sched",
        ("src/hasten/optim/engine.py",),
        "degrades: torch wraps an engine's step() and warns about the order of calls",
    ),
    # loss scaling
    Name(_SCALER, "_enabled", (_SCALING,), _SCALE),
    Name(_SCALER, "_per_optimizer_states", (_SCALING,), _SCALE),
    Name(_SCALER, "_growth_interval", (_SCALING,), _SCALE),
    Name(_SCALER, "_get_growth_tracker", (_SCALING,), _SCALE),
    Name(_SCALER, "_unscale_grads_", (_SCALING,), _SCALE),
    Name("torch", "_amp_foreach_non_finite_check_and_unscale_", (_SCALING,), _SCALE),
    # gradients
    Name(
        "torch:Tensor",
        "_version",
        (
            "src/hasten/extensions/bigmodel/packs.py",
            "src/hasten/extensions/chunked_loss/logits.py",
            _WEIGHTS,
            "src/hasten/optim/gradients.py",
            "src/hasten/state/loop_position.py",
        ),
        "changes of weights, gradients and buffers in place go unnoticed",
    ),
    Name(
        "torch:Tensor",
        "_is_view",
        ("src/hasten/trust/numbers/late_losses.py",),
        "the numbers watch fails",
    ),
    Name(
        "torch:Tensor",
        "_backward_hooks",
        (_HOOKS,),
        "hooks on gradients are not seen by FSDP2",
    ),
    Name(
        "torch:Tensor",
        "_post_accumulate_grad_hooks",
        (_HOOKS,),
        "hooks on gradients are not seen by FSDP2",
    ),
    # many tensors at once
    Name(
        "torch",
        "_foreach_copy_",
        ("src/hasten/state/loop_position.py",),
        "accumulation over several micro-steps fails",
    ),
    Name(
        "torch",
        "_foreach_mul_",
        (_CLIP, "src/hasten/optim/gradients.py", "src/hasten/extensions/muon/muon.py"),
        "clipping, weighted windows and Muon fail",
    ),
    Name(
        "torch",
        "_foreach_lerp_",
        ("src/hasten/optim/ema.py",),
        "moving averages of weights fail",
    ),
    Name("torch", "_foreach_clamp_min_", (_CLIP,), "clipping by value fails"),
    Name("torch", "_foreach_clamp_max_", (_CLIP,), "clipping by value fails"),
    # modules
    Name(
        _MODULE,
        "_apply",
        ("src/hasten/strategies/weight_sources.py",),
        "models on the meta device cannot be filled",
    ),
    Name(
        _MODULE,
        "_buffers",
        ("src/hasten/strategies/weight_sources.py",),
        "models on the meta device cannot be filled",
    ),
    Name(
        _MODULE,
        "_modules",
        ("src/hasten/modules/names.py", "src/hasten/extensions/bigmodel/device_map.py"),
        "wrappers are not seen through, and models cannot be placed",
    ),
    Name(
        _MODULE,
        "_forward_pre_hooks",
        (_META,),
        "the note on weights that were never filled stays",
    ),
    Name(
        _MODULE,
        "_forward_pre_hooks_with_kwargs",
        (_META,),
        "the note on weights that were never filled stays",
    ),
    Name(
        "torch.nn:RNNBase",
        "_flat_weights",
        (_BLOCKS,),
        "offloaded recurrent modules fail",
    ),
    Name(
        "torch.nn:RNNBase",
        "_flat_weights_names",
        (_BLOCKS,),
        "offloaded recurrent modules fail",
    ),
    Name(
        _MODULE,
        "_compiled_call_impl",
        ("src/hasten/strategies/compiling.py",),
        "compiled modules stay compiled",
    ),
    Name(
        _MODULE,
        "_non_persistent_buffers_set",
        (
            "src/hasten/modules/surgery.py",
            "dropin/src/accelerate/_impl/models/modeling.py",
        ),
        "sizes of models cannot be computed",
    ),
    # data
    Name(
        "torch.utils.data:DataLoader",
        "_dataset_kind",
        ("src/hasten/data/skipping.py",),
        "skip_first_batches fails",
    ),
    Name(
        "torch.utils.data:RandomSampler",
        "_num_samples",
        ("src/hasten/data/order.py", "dropin/src/accelerate/_impl/loaders/share.py"),
        "shuffled loaders fail",
    ),
    # the launcher
    Name(_AGENT, "_exit_barrier", (_LAUNCH,), _ELASTIC),
    Name(_AGENT, "_monitor_workers", (_LAUNCH,), _ELASTIC),
    Name(_AGENT, "_pcontext", (_LAUNCH,), _ELASTIC),
    Name(_AGENT, "_remaining_restarts", (_LAUNCH,), _ELASTIC),
    Name(_AGENT, "_shutdown", (_LAUNCH,), _ELASTIC),
    Name(_AGENT, "_start_workers", (_LAUNCH,), _ELASTIC),
    Name(_AGENT, "_worker_group", (_LAUNCH,), _ELASTIC),
    Name(
        "torch.distributed.elastic.multiprocessing.api",
        "_terminate_process_handler",
        (_LAUNCH,),
        _ELASTIC,
    ),
    Name(
        "torch.distributed.distributed_c10d",
        "_get_default_store",
        ("src/hasten/runtime/bootstrap.py",),
        "a process group that the user made cannot be used",
    ),
    # tests and the drop-in
    Name(
        "torch",
        "_dynamo",
        (
            "src/hasten/testing/worker.py",
            "src/hasten/strategies/compiling.py",
            "dropin/src/accelerate/_impl/models/other.py",
        ),
        "test workers keep compiled code; compiled graphs are not counted; is_compiled_module fails",
    ),
    Name(
        "torch.distributed.algorithms",
        "_checkpoint",
        ("dropin/src/accelerate/_impl/checkpoints/fsdp.py",),
        "the drop-in's fsdp2_apply_ac() cannot be imported",
    ),
    Name(
        "torch.distributed.fsdp.wrap:CustomPolicy",
        "_lambda_fn",
        ("dropin/src/accelerate/_impl/settings/fsdp_plugin.py",),
        "custom wrap policies of the drop-in fail",
    ),
    Name(
        "torch._dynamo.eval_frame",
        "_debug_get_cache_entry_list",
        ("src/hasten/strategies/compiling.py",),
        "compiled models fail in their first call",
    ),
    Name(
        "torch._dynamo.eval_frame:OptimizedModule",
        "_orig_mod",
        (
            "dropin/src/accelerate/_impl/models/modeling.py",
            "dropin/src/accelerate/_impl/models/other.py",
        ),
        "the drop-in does not see through compiled modules",
    ),
    Name(
        "torch.optim.lr_scheduler:LRScheduler",
        "_step_count",
        ("dropin/src/accelerate/_impl/optim/scheduler.py",),
        "the drop-in's scheduler counts wrongly",
    ),
    Name(
        "torch.distributed.device_mesh:DeviceMesh",
        "_flatten",
        ("dropin/src/accelerate/_impl/settings/parallelism.py",),
        "the drop-in's device meshes have no joint axes",
    ),
    Name(
        "torch._C",
        "_DisableTorchDispatch",
        ("src/hasten/strategies/context/attention.py",),
        "context parallelism by allgather fails while a mode counts operations",
    ),
    Name(
        "torch",
        "_C",
        (
            "src/hasten/extensions/chunked_loss/logits.py",
            "src/hasten/strategies/context/attention.py",
        ),
        "loss_parallel=True and use_chunked_loss() fail",
    ),
    Name(
        "torch.utils",
        "_python_dispatch",
        (_WATCH,),
        "hasten plan fails",
    ),
    Name("torch", "_subclasses", (_TAKEOVER,), "hasten plan fails"),
)


def missing(names: Iterable[Name] = NAMES) -> list[str]:
    """Return the names that the installed torch lacks."""
    lacking = []
    for entry in names:
        spellings = [entry.name, *([entry.instead_of] if entry.instead_of else [])]
        if not any(_has(entry.owner, spelling) for spelling in spellings):
            lacking.append(f"{entry.owner}.{entry.name}")
    return lacking


def _has(owner: str, name: str) -> bool:
    module, _, cls = owner.partition(":")
    try:
        namespace: Any = importlib.import_module(
            module
        )  # Any: a module, or a class in it
        namespace = getattr(namespace, cls) if cls else namespace
    except (ImportError, AttributeError):
        return False
    if hasattr(namespace, name):
        return True
    if not cls:
        return importlib.util.find_spec(f"{module}.{name}") is not None
    return name in set_on_self(namespace)


def set_on_self(cls: type) -> set[str]:
    """Return the attributes that a class of torch declares, or sets in its methods."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != "torch":
            continue
        try:
            text = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # compiled
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names
