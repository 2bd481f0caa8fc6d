"""Building a model partitioned: under ZeRO-3 every process keeps its part of each parameter from the start."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hasten import trees
from hasten.errors import PrepareError
from hasten.optional import available, need
from hasten.runtime.context import ProcessContext
from hasten.strategies.engines.deepspeed.engine import join, torchs_linear

# Any in this file: DeepSpeed and transformers are untyped.
_TRANSFORMERS: Final = "transformers.integrations.deepspeed"
_CONFIG: Final = "_hf_deepspeed_config_weak_ref"
_LEFT_ALONE: Final = frozenset({"__get__", "__set__", "__hash__", "__repr__", "register_hook", "requires_grad_"})
"""Functions of a parameter that do not read its numbers."""


def is_partitioned(model: nn.Module) -> bool:
    """Whether any parameter of the model was partitioned while it was built."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@contextmanager
def building(config: dict[str, Any], ctx: ProcessContext) -> Iterator[None]:
    """A block in which models are built partitioned, by their constructors or by transformers. Ranks: every rank."""
    deepspeed = join(ctx)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of torch that DeepSpeed has not followed yet
        init = deepspeed.zero.Init(config_dict_or_path=config, tensor_overrides=set())
    partition: Callable[[Any], None] = init._zero_init_param
    built: list[Any] = []

    def noted(parameter: Any) -> None:
        partition(parameter)
        built.append(parameter)

    init._zero_init_param = noted
    # Importing transformers takes seconds; a script that builds one of its models has imported it.
    told = Told(config) if "transformers" in sys.modules else None
    try:
        with torchs_linear(), init, _Gathering(deepspeed.zero.GatheredParameters):
            yield
    finally:
        if told is not None:
            told.forget()
    for parameter in built:
        _round(parameter, init.dtype)


def _round(parameter: Any, dtype: torch.dtype) -> None:
    """Keep a parameter in the engine's precision: constructors have drawn in their own, as where a model is built whole."""
    if parameter.is_floating_point() and parameter.dtype != dtype:
        parameter.all_gather()
        parameter.data, parameter.ds_tensor = parameter.data.to(dtype), None
        parameter.partition()


class Told:
    """What transformers was told: models that it builds are partitioned by a configuration, or whole (None).

    It holds while this object lives, or until `forget`.
    """

    def __init__(self, config: dict[str, Any] | None) -> None:
        self.config = config
        self._module = need(_TRANSFORMERS) if available(_TRANSFORMERS) else None
        if self._module is None:
            return
        self._before = getattr(self._module, _CONFIG)
        if config is None:
            self._module.unset_hf_deepspeed_config()
        elif not self._module.is_deepspeed_zero3_enabled():  # else the arguments of a Trainer have told it
            self._module.set_hf_deepspeed_config(self)

    def is_zero3(self) -> bool:
        """What transformers asks it."""
        return True

    def forget(self) -> None:
        """Let transformers know what it knew before."""
        if self._module is not None:
            setattr(self._module, _CONFIG, self._before)


class _Gathering(TorchFunctionMode):
    """Gathers partitioned parameters around operations on them.

    A parameter holds nothing once its module is built, so that a constructor which initialises the weights of its children
    would change nothing.
    """

    def __init__(self, gather: Callable[..., Any]) -> None:
        super().__init__()
        self._gather = gather

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        apart: list[Tensor] = []
        trees.map_tensors(lambda x: apart.append(x) if _is_apart(x) else x, (args, given))
        name = getattr(func, "__name__", "")
        if apart and func == Tensor.data.__get__:  # type: ignore[attr-defined]
            raise PrepareError(
                "a constructor reads the .data of a parameter that is partitioned already and holds nothing here, so that what it "
                "writes there would be lost. Leave out .data and work on the parameter itself under torch.no_grad(), as the "
                "functions of torch.nn.init do, or build the model outside init_module()."
            )
        if not apart or name in _LEFT_ALONE:
            return func(*args, **given)
        with self._gather(apart, modifier_rank=0):
            return func(*args, **given)


def _is_apart(tensor: Any) -> bool:
    return getattr(getattr(tensor, "ds_status", None), "name", "") == "NOT_AVAILABLE"


def make_whole(model: nn.Module, gather: Callable[..., Any]) -> None:
    """Give the model whole parameters of its own, for one that no engine will gather. Ranks: every rank."""
    made: dict[int, nn.Parameter] = {}  # tied weights stay one
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not hasattr(parameter, "ds_id"):
                continue
            if id(parameter) not in made:
                with gather([parameter]):
                    copy = parameter.detach().clone()
                made[id(parameter)] = nn.Parameter(copy, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
