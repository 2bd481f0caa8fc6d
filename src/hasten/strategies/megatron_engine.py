"""Building a Megatron engine: the package, its process groups, its layers and its own data parallel wrapper."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hasten.config.engines import MegatronLMPlugin
from hasten.errors import ConfigError
from hasten.optional import need
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import device_mesh
from hasten.strategies.megatron_config import EngineArguments

VERSIONS: Final = ">=0.16,<0.17"
"""The versions of megatron-core whose optimizers and schedules this adapter was tried with."""


def _tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS: Final = MappingProxyType(
    {
        "gelu_new": _tanh_gelu,
        "gelu_pytorch_tanh": _tanh_gelu,
        "gelu": functional.gelu,
        "silu": functional.silu,
        "relu": functional.relu,
    }
)
_PLAIN: Final = MappingProxyType(
    {  # kernels of Apex and Transformer Engine, which need not be installed
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
)


@contextmanager
def quiet() -> Iterator[None]:
    """A block without the engine's warnings about packages that it could use as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def hushed() -> Iterator[None]:
    """A block without warnings that megatron-core's own files give; those of the user's code pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings(
            "ignore", message=r".torch\.distributed\.\w+. is deprecated"
        )  # names that torch 2.13 renamed
        yield


@cache  # steps ask for modules too, and reading the installed versions takes longer than a step
def package(name: str = "") -> Any:  # Any: megatron-core is untyped here
    """megatron.core, or a module of it. Raises: MissingPackageError when it is absent or of another version."""
    with quiet():
        need("megatron", VERSIONS, "strategy='megatron'")
        return need(f"megatron.core.{name}" if name else "megatron.core")


def refuse_other_devices(ctx: ProcessContext) -> None:
    """Raise where megatron-core's calls of torch.cuda would not reach the device of this process."""
    try:
        reached = torch.device(torch.cuda.current_device()).type
    except (RuntimeError, AssertionError):  # torch without CUDA, or no driver
        reached = "none"
    if reached != ctx.device.type:
        raise ConfigError(
            f"strategy='megatron' was asked for on {ctx.device.type!r}, and megatron-core calls CUDA throughout; train on NVIDIA GPUs, "
            "or use strategy='fsdp' with tp_size and pp_size."
        )


def join(plugin: MegatronLMPlugin, ctx: ProcessContext) -> None:
    """Make megatron-core's groups over this process's group, forgetting those of one that is gone. Ranks: every rank."""
    state = package("parallel_state")
    if not dist.is_initialized():
        device_mesh(ctx.mesh, ctx.device)
    sizes = (plugin.tp_degree, plugin.pp_degree)
    world, known = getattr(state, "hasten_layout", (None, None))
    if state.model_parallel_is_initialized():
        if world is dist.group.WORLD and known == sizes:
            return
        if world is dist.group.WORLD:
            raise ConfigError(
                f"an Accelerator with tp_degree={sizes[0]}, pp_degree={sizes[1]} was made in a process that has one with {known}, and "
                "megatron-core keeps one layout per process. Start another process."
            )
        state.destroy_model_parallel()
    with quiet():
        state.initialize_model_parallel(
            tensor_model_parallel_size=sizes[0],
            pipeline_model_parallel_size=sizes[1],
            create_gloo_process_groups=False,
        )
    state.hasten_layout = (dist.group.WORLD, sizes)


@dataclass(frozen=True, slots=True)
class Built:
    """This rank's part of a model."""

    wrapper: Any  # Any: megatron-core is untyped
    """megatron-core's DistributedDataParallel, which holds the gradients."""
    chunk: Any
    """The GPTModel inside."""
    config: Any
    first: bool
    last: bool
    layer_offset: int
    """The number, in the whole model, of this rank's first layer."""


def build(made: EngineArguments, initialise: bool, seed: int, shared: bool) -> Built:
    """This rank's layers, with weights of megatron-core's own initialisation if asked for. Ranks: every rank."""
    state, random = package("parallel_state"), package("tensor_parallel.random")
    with quiet():
        random.model_parallel_cuda_manual_seed(seed)
        config = _transformer_config(made, initialise)
        first, last = state.is_pipeline_first_stage(), state.is_pipeline_last_stage()
        block = package("transformer.transformer_block")
        gpt = package("models.gpt")
        chunk: nn.Module = gpt.GPTModel(
            config=config,
            transformer_layer_spec=_layers(config, block.get_num_layers_to_build(config)),
            pre_process=first,
            post_process=last,
            parallel_output=True,
            **made.model,
        )
        chunk.cuda(torch.cuda.current_device())
        if config.bf16:
            chunk = package("transformer.module").Float16Module(config, chunk)
        parallel = package("distributed")
        options = parallel.DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=shared)
        wrapper = parallel.DistributedDataParallel(config, options, chunk)
        offset = package("transformer.transformer_layer").get_transformer_layer_offset(config)
    inner = chunk.module if config.bf16 else chunk
    return Built(wrapper, inner, config, first, last, offset)


def _transformer_config(made: EngineArguments, initialise: bool) -> Any:  # Any: megatron-core is untyped
    given = dict(made.transformer)
    given["activation_func"] = _ACTIVATIONS[given["activation_func"]]
    given["attention_backend"] = package("transformer.enums").AttnBackend[given["attention_backend"]]
    for name in ("params_dtype", "pipeline_dtype", "autocast_dtype"):
        given[name] = getattr(torch, given[name])
    transformer = package("transformer")
    return transformer.TransformerConfig(**given, **_PLAIN, perform_initialization=initialise)


def _norm(config: Any, hidden_size: int, eps: float, **_: Any) -> nn.Module:  # Any: megatron-core is untyped
    """A normalisation of torch's own; its gradients are summed over the parts of a sequence."""
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    made = kind(hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in made.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return made


class Norm(nn.Module):
    """What a layer's description names as its normalisation: a class, as megatron-core expects."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        return _norm(config, hidden_size, eps, **kwargs)


def _layers(config: Any, number: int) -> Any:
    """The description of this rank's layers: megatron-core's own, with normalisations of torch."""
    specs = package("models.gpt.gpt_layer_specs")
    block = package("transformer.transformer_block")
    layer = specs.get_gpt_layer_local_spec(normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return block.TransformerBlockSubmodules(layer_specs=[layer] * number, layer_norm=Norm)
