"""Gathered parameters of forwards without gradients, which no backward frees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.hooks import RemovableHandle

GENERATE: Final = "generate"


class ReshardWithoutGradients:
    """Forward hooks of the shard groups that free what a forward without gradients gathered.

    With reshard_after_forward=False, FSDP2 frees gathered parameters in the backward only. After an evaluation the modules would
    hold gathered copies, and whatever reads `module.parameters()` would read these instead of the shards.
    """

    def __init__(self, model: FSDPModule) -> None:
        assert isinstance(model, nn.Module), "FSDP2 wraps modules"
        self._is_generating = False
        self._groups: list[FSDPModule] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_hook(self._reshard_module)
                _gather_first_as_normal_tensors(module)
                self._groups.append(module)

    def _reshard_module(
        self, module: nn.Module, inputs: object, output: object
    ) -> None:
        if not torch.is_grad_enabled() and not self._is_generating:
            assert isinstance(module, FSDPModule), (
                "the hook is registered on shard groups"
            )
            module.reshard()

    def wrap_generate(
        self, model: FSDPModule, reshard_after_forward: bool | int
    ) -> None:
        """Keep the root group gathered while `generate` runs, which calls encoders beside the model's forward."""
        assert isinstance(model, nn.Module), "FSDP2 wraps modules"
        if not callable(getattr(model, GENERATE, None)):
            return
        register_fsdp_forward_method(model, GENERATE)
        # Any: arguments and outputs of the model's own method
        generate: Callable[..., Any] = getattr(model, GENERATE)

        @wraps(generate)
        def generate_gathered(*args: Any, **kwargs: Any) -> Any:
            with self._keeping_gathered(model, bool(reshard_after_forward)):
                return generate(*args, **kwargs)

        setattr(model, GENERATE, generate_gathered)

    @contextmanager
    def _keeping_gathered(
        self, model: FSDPModule, reshard_after_forward: bool
    ) -> Iterator[None]:
        self._is_generating = True
        model.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            self._is_generating = False
            model.set_reshard_after_forward(reshard_after_forward, recurse=False)
            for group in self._groups:
                group.reshard()


def mark_forward_method(model: nn.Module, name: str) -> None:
    """Make a call of the method gather the root group's parameters, and free them afterwards if no backward will."""
    if not isinstance(model, FSDPModule) or name == GENERATE:
        return
    register_fsdp_forward_method(model, name)
    # Any: arguments and outputs of the user's method
    method: Callable[..., Any] = getattr(model, name)

    @wraps(method)
    def call_gathered(*args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        if not torch.is_grad_enabled():
            model.reshard()
        return output

    setattr(model, name, call_gathered)


def _gather_first_as_normal_tensors(module: FSDPModule) -> None:
    """Allocate the buffers of gathered parameters outside of inference mode, whose tensors no later backward could use."""
    assert isinstance(module, nn.Module), "FSDP2 wraps modules"
    handles: list[RemovableHandle] = []
    handles.append(
        module.register_forward_pre_hook(
            partial(_gather_as_normal_tensors, handles), prepend=True
        )
    )


def _gather_as_normal_tensors(
    handles: list[RemovableHandle], module: nn.Module, inputs: object
) -> None:
    handles.pop().remove()
    if torch.is_inference_mode_enabled():
        assert isinstance(module, FSDPModule), "the hook is registered on shard groups"
        with torch.inference_mode(False), torch.no_grad():
            module.unshard()
