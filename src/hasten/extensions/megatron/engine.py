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
from hasten.extensions.megatron.package import hide_warnings, import_megatron
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


def _make_norm(config: Any, hidden_size: int, eps: float) -> nn.Module:
    """Return a norm of torch; its gradients are summed over shards of a sequence."""
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    norm_module = kind(hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm_module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm_module


class Norm(nn.Module):
    """Norm for layer specs, which need a class; creates a norm of torch."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return _make_norm(config, hidden_size, eps)


def decoder_layers(config: Any, num_layers: int) -> Any:
    """Return the spec of a rank's layers of a decoder-only model."""
    layer_specs = import_megatron("models.gpt.gpt_layer_specs")
    layer_spec = layer_specs.get_gpt_layer_local_spec(
        normalization=config.normalization
    )
    layer_spec.submodules.input_layernorm = layer_spec.submodules.pre_mlp_layernorm = (
        Norm
    )
    return import_megatron("transformer.transformer_block").TransformerBlockSubmodules(
        layer_specs=[layer_spec] * num_layers, layer_norm=Norm
    )


def chunk_of(
    engine_arguments: EngineArguments, facts: ModelFacts, config: Any
) -> nn.Module:
    """Return the layers of this pipeline stage. Ranks: every rank."""
    parallel_state = import_megatron("parallel_state")
    num_layers = import_megatron(
        "transformer.transformer_block"
    ).get_num_layers_to_build(config)
    stage_chunk: Any = import_megatron("models.gpt").GPTModel(
        config=config,
        transformer_layer_spec=decoder_layers(config, num_layers),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        **engine_arguments.model,
    )
    if stage_chunk.pre_process and facts.fixed_token is not None:
        stage_chunk.embedding.word_embeddings.register_forward_hook(
            _FixedEmbedding(facts.fixed_token)
        )
    built_chunk: nn.Module = stage_chunk
    return built_chunk


class _FixedEmbedding:
    """Forward hook that keeps the gradient of one token's embedding at zero, like `padding_idx` in torch."""

    def __init__(self, token: int) -> None:
        self._token = token

    def __call__(
        self, words: Any, inputs: tuple[Tensor, ...], embeddings: Tensor
    ) -> Tensor:
        is_fixed = inputs[0] == self._token
        # this tensor-parallel rank's shard of (tokens, batch, width)
        if words.reduce_scatter_embeddings:
            parallel_state = import_megatron("parallel_state")
            num_ranks = parallel_state.get_tensor_model_parallel_world_size()
            own_rank = parallel_state.get_tensor_model_parallel_rank()
            is_fixed = is_fixed.t().chunk(num_ranks)[own_rank]
        return torch.where(is_fixed[..., None], embeddings.detach(), embeddings)


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


def _describe_sizes(parallel_sizes: Mapping[str, int | None]) -> str:
    """Return the parallel sizes that are not 1, by the names of the plugin's fields."""
    shown_sizes = []
    for field, keyword in _SIZES.items():
        if parallel_sizes[keyword] not in (None, 1):
            shown_sizes.append(f"{field}={parallel_sizes[keyword]}")
    return ", ".join(shown_sizes) or "data parallel ranks only"


def refuse_other_devices(ctx: ProcessContext) -> None:
    """Raise if megatron-core's calls of torch.cuda would not use the device of this process."""
    try:
        cuda_device_type = torch.device(torch.cuda.current_device()).type
    except (RuntimeError, AssertionError):  # torch without CUDA, or no driver
        cuda_device_type = "none"
    if cuda_device_type != ctx.device.type:
        raise ConfigError(
            f"strategy='megatron' is not supported on {ctx.device.type!r}, because megatron-core needs CUDA; train on NVIDIA GPUs, "
            "or use strategy='fsdp' with tp_size and pp_size."
        )


def create_groups(plugin: MegatronLMPlugin, ctx: ProcessContext) -> None:
    """Create megatron-core's groups in this process's group, replacing those of a destroyed group. Ranks: every rank."""
    parallel_state = import_megatron("parallel_state")
    if not dist.is_initialized():
        device_mesh(ctx.mesh, ctx.device)
    parallel_sizes = {
        keyword: getattr(plugin, field) for field, keyword in _SIZES.items()
    }
    existing_world, existing_sizes = getattr(
        parallel_state, "hasten_layout", (None, {})
    )
    if parallel_state.model_parallel_is_initialized():
        if existing_world is dist.group.WORLD and existing_sizes == parallel_sizes:
            return
        if existing_world is dist.group.WORLD:
            raise ConfigError(
                f"an Accelerator with {_describe_sizes(parallel_sizes)} was created in a process that already has one with {_describe_sizes(existing_sizes)}, but "
                "megatron-core supports one layout per process. Start another process."
            )
        parallel_state.destroy_model_parallel()
    with hide_warnings():
        parallel_state.initialize_model_parallel(
            **parallel_sizes, create_gloo_process_groups=False
        )
    parallel_state.hasten_layout = (dist.group.WORLD, parallel_sizes)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
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


def build_engine(
    engine_arguments: EngineArguments,
    facts: ModelFacts,
    initialise: bool,
    seed: int,
    shares_state: bool,
) -> BuiltEngine:
    """Build this rank's layers, initialised by megatron-core if `initialise` is set. Ranks: every rank."""
    parallel_state = import_megatron("parallel_state")
    random_module = import_megatron("tensor_parallel.random")
    with hide_warnings():
        random_module.model_parallel_cuda_manual_seed(seed)
        config = _transformer_config(engine_arguments, initialise)
        inner_chunk = chunk_of(engine_arguments, facts, config)
        inner_chunk.cuda(torch.cuda.current_device())
        if config.bf16:
            chunk = import_megatron("transformer.module").Float16Module(
                config, inner_chunk
            )
        else:
            chunk = inner_chunk
        distributed_module = import_megatron("distributed")
        wrapper_options = distributed_module.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=shares_state
        )
        wrapper = distributed_module.DistributedDataParallel(
            config, wrapper_options, chunk
        )
        layer_offset = import_megatron(
            "transformer.transformer_layer"
        ).get_transformer_layer_offset(config)
    first = parallel_state.is_pipeline_first_stage()
    last = parallel_state.is_pipeline_last_stage()
    return BuiltEngine(wrapper, inner_chunk, config, first, last, layer_offset)


# Any: megatron-core is untyped
def _transformer_config(engine_arguments: EngineArguments, initialise: bool) -> Any:
    config_settings = dict(engine_arguments.transformer)
    config_settings["activation_func"] = ACTIVATION[config_settings["activation_func"]]
    config_settings["attention_backend"] = import_megatron(
        "transformer.enums"
    ).AttnBackend[config_settings["attention_backend"]]
    for dtype_name in ("params_dtype", "pipeline_dtype", "autocast_dtype"):
        config_settings[dtype_name] = getattr(torch, config_settings[dtype_name])
    return import_megatron("transformer").TransformerConfig(
        **config_settings, **_PLAIN, perform_initialization=initialise
    )
