"""Construction of a Megatron engine: its process groups, its layers and its data-parallel wrapper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hasten.errors import ConfigError
from hasten.extensions.megatron.config import EngineArguments
from hasten.extensions.megatron.families import ModelFacts
from hasten.extensions.megatron.package import package, quiet
from hasten.extensions.megatron.settings import MegatronLMPlugin
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import device_mesh

# Any in this file: megatron-core is untyped.


def _tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATION: Final = MappingProxyType[str, Callable[[Tensor], Tensor]](
    {
        "gelu_new": _tanh_gelu,
        "gelu_pytorch_tanh": _tanh_gelu,
        "gelu": functional.gelu,
        "silu": functional.silu,
        "relu": functional.relu,
    }
)


def _norm(config: Any, hidden_size: int, eps: float) -> nn.Module:
    """Return a norm of torch; its gradients are summed over shards of a sequence."""
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    made = kind(hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in made.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return made


class Norm(nn.Module):
    """Norm for layer specs, which need a class; creates a norm of torch."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return _norm(config, hidden_size, eps)


def decoder_layers(config: Any, number: int) -> Any:
    """Return the spec of a rank's layers of a decoder-only model."""
    specs = package("models.gpt.gpt_layer_specs")
    layer = specs.get_gpt_layer_local_spec(normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return package("transformer.transformer_block").TransformerBlockSubmodules(
        layer_specs=[layer] * number, layer_norm=Norm
    )


def chunk_of(made: EngineArguments, facts: ModelFacts, config: Any) -> nn.Module:
    """Return the layers of this pipeline stage. Ranks: every rank."""
    state = package("parallel_state")
    number = package("transformer.transformer_block").get_num_layers_to_build(config)
    chunk: Any = package("models.gpt").GPTModel(
        config=config,
        transformer_layer_spec=decoder_layers(config, number),
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        parallel_output=True,
        **made.model,
    )
    if chunk.pre_process and facts.fixed_token is not None:
        chunk.embedding.word_embeddings.register_forward_hook(_Fixed(facts.fixed_token))
    built: nn.Module = chunk
    return built


class _Fixed:
    """Forward hook that keeps the gradient of one token's embedding at zero, like `padding_idx` in torch."""

    def __init__(self, token: int) -> None:
        self._token = token

    def __call__(self, words: Any, inputs: tuple[Tensor, ...], found: Tensor) -> Tensor:
        fixed = inputs[0] == self._token
        # this tensor-parallel rank's shard of (tokens, batch, width)
        if words.reduce_scatter_embeddings:
            parts = package("parallel_state")
            ranks, own = (
                parts.get_tensor_model_parallel_world_size(),
                parts.get_tensor_model_parallel_rank(),
            )
            fixed = fixed.t().chunk(ranks)[own]
        return torch.where(fixed[..., None], found.detach(), found)


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


_SIZES: Final = MappingProxyType(
    {
        "tp_degree": "tensor_model_parallel_size",
        "pp_degree": "pipeline_model_parallel_size",
    }
)
"""Fields of the plugin and the corresponding keywords of megatron-core."""


def _shown(sizes: Mapping[str, int | None]) -> str:
    """Return the parallel sizes that are not 1, by the names of the plugin's fields."""
    shown = [
        f"{field}={sizes[keyword]}"
        for field, keyword in _SIZES.items()
        if sizes[keyword] not in (None, 1)
    ]
    return ", ".join(shown) or "data parallel ranks only"


def refuse_other_devices(ctx: ProcessContext) -> None:
    """Raise if megatron-core's calls of torch.cuda would not use the device of this process."""
    try:
        reached = torch.device(torch.cuda.current_device()).type
    except (RuntimeError, AssertionError):  # torch without CUDA, or no driver
        reached = "none"
    if reached != ctx.device.type:
        raise ConfigError(
            f"strategy='megatron' is not supported on {ctx.device.type!r}, because megatron-core needs CUDA; train on NVIDIA GPUs, "
            "or use strategy='fsdp' with tp_size and pp_size."
        )


def join(plugin: MegatronLMPlugin, ctx: ProcessContext) -> None:
    """Create megatron-core's groups in this process's group, replacing those of a destroyed group. Ranks: every rank."""
    state = package("parallel_state")
    if not dist.is_initialized():
        device_mesh(ctx.mesh, ctx.device)
    sizes = {keyword: getattr(plugin, field) for field, keyword in _SIZES.items()}
    world, known = getattr(state, "hasten_layout", (None, {}))
    if state.model_parallel_is_initialized():
        if world is dist.group.WORLD and known == sizes:
            return
        if world is dist.group.WORLD:
            raise ConfigError(
                f"an Accelerator with {_shown(sizes)} was created in a process that already has one with {_shown(known)}, but "
                "megatron-core supports one layout per process. Start another process."
            )
        state.destroy_model_parallel()
    with quiet():
        state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    state.hasten_layout = (dist.group.WORLD, sizes)


@dataclass(frozen=True, slots=True)
class Built:
    """This rank's shard of a model."""

    wrapper: Any  # Any: megatron-core is untyped
    """megatron-core's DistributedDataParallel, which holds the gradients."""
    chunk: Any
    """The model of megatron-core inside the wrapper."""
    config: Any
    first: bool
    last: bool
    layer_offset: int
    """Index of this rank's first layer in the whole model."""


def build(
    made: EngineArguments, facts: ModelFacts, initialise: bool, seed: int, shared: bool
) -> Built:
    """Build this rank's layers, initialised by megatron-core if `initialise` is set. Ranks: every rank."""
    state, random = package("parallel_state"), package("tensor_parallel.random")
    with quiet():
        random.model_parallel_cuda_manual_seed(seed)
        config = _transformer_config(made, initialise)
        inner = chunk_of(made, facts, config)
        inner.cuda(torch.cuda.current_device())
        chunk = (
            package("transformer.module").Float16Module(config, inner)
            if config.bf16
            else inner
        )
        parallel = package("distributed")
        options = parallel.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=shared
        )
        wrapper = parallel.DistributedDataParallel(config, options, chunk)
        offset = package("transformer.transformer_layer").get_transformer_layer_offset(
            config
        )
    first, last = state.is_pipeline_first_stage(), state.is_pipeline_last_stage()
    return Built(wrapper, inner, config, first, last, offset)


# Any: megatron-core is untyped
def _transformer_config(made: EngineArguments, initialise: bool) -> Any:
    settings = dict(made.transformer)
    settings["activation_func"] = ACTIVATION[settings["activation_func"]]
    settings["attention_backend"] = package("transformer.enums").AttnBackend[
        settings["attention_backend"]
    ]
    for name in ("params_dtype", "pipeline_dtype", "autocast_dtype"):
        settings[name] = getattr(torch, settings[name])
    return package("transformer").TransformerConfig(
        **settings, **_PLAIN, perform_initialization=initialise
    )
