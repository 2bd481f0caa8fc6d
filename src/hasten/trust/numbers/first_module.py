"""Search for the first module whose output is not finite, by repeating the last batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hasten import trees


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """The latest training forward of a model: its arguments, detached, and the random states before it."""

    model: nn.Module
    args: tuple[Any, ...]  # Any: the user's arguments
    kwargs: dict[str, Any]
    random: tuple[Tensor, Tensor | None]


@dataclass(slots=True)
class LastCalls:
    """The latest forward of each model that is followed."""

    _calls: dict[int, ModuleCall] = field(default_factory=dict)
    _followed_models: WeakSet[nn.Module] = field(default_factory=WeakSet)

    def record_calls(self, model: nn.Module) -> None:
        """Record the forwards of this model from now on."""
        if model not in self._followed_models:
            self._followed_models.add(model)
            model.register_forward_pre_hook(self._record_call, with_kwargs=True)

    def latest_calls(self) -> list[ModuleCall]:
        """Return the calls since `clear`, in order of their models' first calls."""
        return list(self._calls.values())

    def clear(self) -> None:
        """Drop the calls and the batches that they hold."""
        self._calls.clear()

    def _record_call(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if (
            torch.is_grad_enabled()
            and model.training
            and not torch.compiler.is_compiling()
        ):
            plain_args, plain_kwargs = trees.map_tensors(Tensor.detach, (args, kwargs))
            self._calls[id(model)] = ModuleCall(
                model, plain_args, plain_kwargs, _random_states(model)
            )


def first_bad_module(module_call: ModuleCall, module: nn.Module) -> str:
    """Return a description of the first module inside `module` whose output is not finite when the call is repeated.

    Weights, buffers and random states are unchanged afterwards.
    """
    bad_modules: list[str] = []
    handles: list[RemovableHandle] = []

    def watch_output(name: str, kind: str) -> Any:  # Any: a hook of torch's
        def check_output(_module: nn.Module, _args: object, output: object) -> None:
            if not bad_modules and not all_finite(trees.tensors(output)):
                module_words = repr(name) if name else "the model itself"
                bad_modules.append(f"{module_words} ({kind})")

        return check_output

    if all_finite(trees.tensors((module_call.args, module_call.kwargs))):
        input_words = ""
    else:
        input_words = "the batch contains nan or inf; "
    with torch.no_grad(), _as_before(module, module_call):
        try:
            for module_name, inner_module in module.named_modules():
                check_output = watch_output(module_name, type(inner_module).__name__)
                handles.append(inner_module.register_forward_hook(check_output))
            module(*module_call.args, **module_call.kwargs)
        # the user's forward may raise on such numbers, which is a result too
        except Exception as error:
            return f"{input_words}running the batch again raised {type(error).__name__}: {error}"
        finally:
            for handle in handles:
                handle.remove()
    if bad_modules:
        first_words = bad_modules[0]
    else:
        first_words = "none: every output was finite, so it was caused by the loss or the backward pass"
    return f"{input_words}{first_words}"


def all_finite(tensors: Any) -> bool:  # Any: an iterable of tensors
    """Return whether every number of the tensors is finite."""
    for tensor in tensors:
        may_be_infinite = tensor.is_floating_point() or tensor.is_complex()
        if may_be_infinite and not torch.isfinite(tensor).all():
            return False
    return True


@contextmanager
def _as_before(module: nn.Module, module_call: ModuleCall) -> Iterator[None]:
    """Context manager that sets the call's random states, and restores buffers and random states at the end."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    current_states = _random_states(module)
    _set_random_states(module, module_call.random)
    try:
        yield
    finally:
        _set_random_states(module, current_states)
        for buffer, saved_buffer in buffers:
            buffer.copy_(saved_buffer)


def _random_states(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    device = _find_device(model)
    device_state = None
    if device.type == "cuda":
        device_state = torch.cuda.get_rng_state(device)
    return torch.get_rng_state(), device_state


def _set_random_states(model: nn.Module, states: tuple[Tensor, Tensor | None]) -> None:
    host_state, device_state = states
    torch.set_rng_state(host_state)
    if device_state is not None:
        torch.cuda.set_rng_state(device_state, _find_device(model))


def _find_device(model: nn.Module) -> torch.device:
    return next(
        (parameter.device for parameter in model.parameters()), torch.device("cpu")
    )
