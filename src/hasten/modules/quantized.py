"""Quantized weights of torchao and bitsandbytes as plain bytes, which are sharded, broadcast and saved like any tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from hasten.errors import PrepareError, StepError

# Any in this file: layers, tensors and quantization states of bitsandbytes and torchao.

_ALIGNED: Final = 16
_STATE_ATTRIBUTE: Final = "quant_state"


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """Positions of a quantized tensor's inner tensors in a vector of bytes, and the arguments that rebuild it."""

    kind: Any
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    inner: tuple[tuple[str, torch.dtype, torch.Size, int], ...]
    """Name, dtype, shape and first byte of each inner tensor."""


def is_torchao(tensor: Tensor) -> bool:
    """Return True for a quantized tensor of torchao, which is made of plain tensors; one that is cast while it trains is none."""
    tensor = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    package_name, _, submodule = type(tensor).__module__.partition(".")
    return (
        package_name == "torchao"
        and not submodule.startswith("float8.")
        and hasattr(tensor, "__tensor_flatten__")
    )


def is_bitsandbytes(tensor: Tensor) -> bool:
    """Return True for a tensor that bitsandbytes quantized; its scales are stored separately and are lost in a copy."""
    return type(tensor).__module__.partition(".")[0] == "bitsandbytes"


def is_four_bit(layer: nn.Module) -> bool:
    """Return True for a layer of bitsandbytes with weights of four bits, sharded or whole."""
    bnb_module = sys.modules.get("bitsandbytes.nn")
    return bnb_module is not None and isinstance(layer, bnb_module.Linear4bit)


def to_bytes(tensor: Tensor) -> tuple[Tensor, ByteLayout]:
    """Return the inner tensors of a quantized tensor as one column of bytes, and their layout."""
    weight: Any = tensor.detach()
    inner_names, context = weight.__tensor_flatten__()
    byte_pieces: list[Tensor] = []
    inner_layouts: list[tuple[str, torch.dtype, torch.Size, int]] = []
    byte_position = 0
    for inner_name in inner_names:
        inner_tensor = getattr(weight, inner_name).contiguous()
        # a single value may have any stride
        raw_bytes = inner_tensor.as_strided((inner_tensor.numel(),), (1,)).view(
            torch.uint8
        )
        num_padding_bytes = -len(raw_bytes) % _ALIGNED
        inner_layouts.append(
            (inner_name, inner_tensor.dtype, inner_tensor.shape, byte_position)
        )
        byte_pieces += [raw_bytes, raw_bytes.new_zeros(num_padding_bytes)]
        byte_position += len(raw_bytes) + num_padding_bytes
    layout = ByteLayout(
        type(weight), context, weight.shape, weight.stride(), tuple(inner_layouts)
    )
    return torch.cat(byte_pieces).unsqueeze(1), layout


def from_bytes(data: Tensor, layout: ByteLayout) -> Tensor:
    """Return the quantized tensor whose inner tensors are views of these bytes."""
    flat_bytes = data.reshape(-1)
    inner_tensors = {}
    for inner_name, dtype, shape, first_byte in layout.inner:
        num_bytes = shape.numel() * dtype.itemsize
        inner_tensors[inner_name] = (
            flat_bytes.narrow(0, first_byte, num_bytes).view(dtype).view(shape)
        )
    context = _on_device(layout.context, data.device)
    weight: Tensor = layout.kind.__tensor_unflatten__(
        inner_tensors, context, layout.size, layout.stride
    )
    return weight


def copy_inner_tensors(source: Tensor, target: Tensor) -> None:
    """Copy the values of a quantized tensor into another of the same layout."""
    weight: Any = target.detach()
    inner_names, _ = weight.__tensor_flatten__()
    for name in inner_names:
        getattr(weight, name).copy_(getattr(source, name))


def _on_device(context: Any, device: torch.device) -> Any:
    """Return the arguments of a rebuilt tensor with the device of its bytes."""
    if isinstance(context, torch.device):
        return device
    if isinstance(context, Mapping):
        return {key: _on_device(value, device) for key, value in context.items()}
    if (
        is_dataclass(context)
        and not isinstance(context, type)
        and any(field.name == "device" for field in fields(context))
    ):
        return replace(context, device=device)
    return context


class UnpackedInForward:
    """Pair of forward hooks that replace a layer's bytes by its quantized weight while the layer runs."""

    def __init__(self, layer: nn.Module, name: str, layout: ByteLayout) -> None:
        self._name = name
        self._layout = layout
        self._bytes: nn.Parameter | None = None
        layer.register_forward_pre_hook(self._unpack)
        layer.register_forward_hook(self._restore, always_call=True)

    def _unpack(self, layer: nn.Module, inputs: object) -> None:
        parameter = layer._parameters[self._name]
        assert parameter is not None, "the layer has lost its weight"
        _check_bytes(layer, self._name)
        if parameter.dtype == torch.uint8 and type(parameter.data) is Tensor:
            self._bytes = parameter
            layer._parameters[self._name] = nn.Parameter(
                from_bytes(parameter.data, self._layout), requires_grad=False
            )

    def _restore(self, layer: nn.Module, inputs: object, outputs: object) -> None:
        if self._bytes is not None:
            layer._parameters[self._name], self._bytes = self._bytes, None


class PackedLayers:
    """Quantized layers of one model whose weights have become plain bytes, for sharding."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Replace the model's quantized weights by bytes, in place.

        Raises: PrepareError for quantized weights that are trained, or that have no values on this rank.
        """
        self.num_bytes = 0
        self._four_bit: list[Any] = []
        for prefix, layer in model.named_modules():
            if is_four_bit(layer):
                self._pack_four_bit(prefix, layer, device)
            else:
                self._pack_torchao(prefix, layer)

    def _pack_torchao(self, prefix: str, layer: nn.Module) -> None:
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if is_torchao(parameter):
                _check_frozen(f"{prefix}.{name}", parameter)
                weight_bytes, layout = to_bytes(parameter.data)
                self.num_bytes += len(weight_bytes)
                layer._parameters[name] = nn.Parameter(
                    weight_bytes, requires_grad=False
                )
                UnpackedInForward(layer, name, layout)

    def _pack_four_bit(self, prefix: str, layer: Any, device: torch.device) -> None:
        weight = layer.weight
        _check_frozen(f"{prefix}.weight", weight)
        # undoes the layout that bitsandbytes uses for inference on some processors
        layer.state_dict()
        quant_state = getattr(layer.weight, _STATE_ATTRIBUTE, None)
        if quant_state is None or weight.is_meta:
            raise PrepareError(
                f"{prefix}.weight is a four-bit weight without values or scales on this rank ({weight.device}), so it cannot be "
                "sharded; load and quantize the model on every rank (move the layer to a device) before prepare()."
            )
        quant_state.to(device)
        weight_bytes = layer.weight.data.contiguous().view(torch.uint8).reshape(-1, 1)
        self.num_bytes += len(weight_bytes)
        layer.weight = nn.Parameter(weight_bytes, requires_grad=False)
        layer.quant_state = quant_state
        layer.quant_storage = torch.uint8
        # that layout cannot be gathered from shards
        layer.support_avx512bf16_for_cpu = False
        layer.register_forward_pre_hook(_check_four_bit)
        self._four_bit.append(layer)

    @property
    def notes(self) -> list[str]:
        """One line about the quantized weights, if there are any."""
        if not self.num_bytes:
            return []
        return [
            f"{self.num_bytes / 2**20:.1f} MiB of quantized weights are sharded as bytes; four-bit scales are replicated"
        ]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of scales, which are replicated."""
        for layer in self._four_bit:
            yield from state_tensors(layer.quant_state)

    def attach_states(self) -> None:
        """Give the sharded weights their scales, so that state dicts have the entries of bitsandbytes."""
        for layer in self._four_bit:
            setattr(layer.weight, _STATE_ATTRIBUTE, layer.quant_state)


def _check_bytes(layer: nn.Module, name: str) -> None:
    """Raise StepError if the gathered bytes of a quantized weight were converted to numbers of another dtype."""
    parameter = layer._parameters[name]
    if (
        parameter is not None
        and type(parameter.data) is Tensor
        and parameter.dtype != torch.uint8
    ):
        raise StepError(
            f"the bytes of a quantized weight of {type(layer).__name__} were converted to {parameter.dtype}, as FSDP2 of torch "
            f"{torch.__version__} does under mixed precision, so their values are lost. Use mixed_precision='no' with a base model in "
            "bfloat16, or a newer torch."
        )


def _check_four_bit(layer: nn.Module, inputs: object) -> None:
    _check_bytes(layer, "weight")


@contextmanager
def frozen_integers() -> Iterator[None]:
    """Context manager in which `nn.Parameter(tensor)` of integers makes a frozen parameter instead of raising an error.

    torch<2.12: fully_shard() creates every sharded parameter with gradients, and freezes it afterwards.
    """
    original_new = vars(nn.Parameter)["__new__"]

    def new(
        cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True
    ) -> Any:
        is_integer = isinstance(data, Tensor) and not (
            data.is_floating_point() or data.is_complex()
        )
        return original_new.__func__(cls, data, requires_grad and not is_integer)

    nn.Parameter.__new__ = new  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Parameter.__new__ = original_new  # type: ignore[method-assign]


def _check_frozen(name: str, weight: Tensor) -> None:
    if weight.requires_grad:
        raise PrepareError(
            f"{name} is quantized and requires gradients, and steps of an optimizer would be lost in its rounding; freeze it with "
            "requires_grad_(False) and train adapters, for example LoRA of peft."
        )


def state_tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of a quantization state of bitsandbytes, with those of nested scales."""
    candidate_tensors = (state.absmax, state.code, getattr(state, "offset", None))
    yield from (tensor for tensor in candidate_tensors if isinstance(tensor, Tensor))
    if getattr(state, "state2", None) is not None:
        yield from state_tensors(state.state2)


def restore_states_on_load(model: nn.Module) -> None:
    """Make loads of a state dict restore the scales of four-bit layers too, which bitsandbytes only saves."""
    for layer in model.modules():
        if is_four_bit(layer) and not getattr(layer, "restores_quant_state", False):
            layer.register_load_state_dict_pre_hook(_restore_state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            layer.restores_quant_state = True  # type: ignore[assignment]  # a mark, no module or tensor


def _restore_state(layer: Any, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    key_prefix = f"{prefix}weight."
    state_entries = {
        key.removeprefix(key_prefix): value
        for key, value in state.items()
        if key.startswith(key_prefix)
    }
    if state_entries:
        quant_state = layer.quant_state
        if quant_state is None:
            quant_state = layer.weight.quant_state
        loaded_state = type(quant_state).from_dict(
            qs_dict=state_entries, device=quant_state.absmax.device
        )
        for current_tensor, loaded_tensor in zip(
            state_tensors(quant_state), state_tensors(loaded_state), strict=True
        ):
            current_tensor.copy_(loaded_tensor)
