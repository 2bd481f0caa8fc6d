"""Exponential moving average of a model's weights, kept sharded as the model is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError, StepError
from hasten.modules.names import local_tensor
from hasten.optim.engine import EngineOptimizer
from hasten.optim.optimizer import PreparedOptimizer
from hasten.optim.run_part import RunPart
from hasten.optim.window import Holder

Decay = float | Callable[[int], float]
_KEY = "average"


class AverageState(torch.optim.Optimizer):
    """Averages in the form of optimizer state, so that checkpoints store and reshard them by parameter name."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__([{"params": list(parameters)}], {})
        self.num_updates: dict[str, int] = {}
        self.swapped = False
        """True while the model holds the averaged weights instead of the trained ones."""
        for parameter in parameters:
            self.state[parameter][_KEY] = parameter.detach().to(
                torch.float32, copy=True
            )

    def refuse_if_swapped(self, act: str) -> None:
        """Raise StepError if the model holds the averaged weights, which `act` would take for the trained ones."""
        if self.swapped:
            raise StepError(
                f"{act} was called inside `with ema.swapped():`, where the model holds the averaged weights; they would be "
                "taken for the trained ones. Call it outside the block; save_model() exports the average."
            )

    def average(self, parameter: Tensor) -> Tensor:
        """Return this rank's shard of a parameter's average."""
        average: Tensor = self.state[parameter][_KEY]
        return local_tensor(average)

    def state_dict(self) -> dict[str, Any]:  # Any: as in torch
        """Return the averages by index of their parameter, and the number of updates."""
        return {**super().state_dict(), "num_updates": dict(self.num_updates)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # Any: as in torch
        """Load averages and counters."""
        super().load_state_dict(
            {key: state_dict[key] for key in ("state", "param_groups")}
        )
        # torch casts state to the parameter's dtype
        for parameter, values in self.state.items():
            values[_KEY] = values[_KEY].to(torch.float32)
            assert values[_KEY].shape == parameter.shape
        self.num_updates = {
            str(key): int(value) for key, value in state_dict["num_updates"].items()
        }

    def restart(self) -> None:
        """Set the averages to the present weights, as at the beginning of a run."""
        for parameter in self.param_groups[0]["params"]:
            self.average(parameter).copy_(local_tensor(parameter.detach()))
        self.num_updates = dict.fromkeys(self.num_updates, 0)


class EMA(RunPart):
    """Exponential moving average of one prepared model, updated after every applied optimizer update.

    Made by `Accelerator.ema`. Averages are float32 and sharded as the parameters, so that their update needs no
    communication; they are part of `save_state` and `load_state`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[PreparedOptimizer],
        decay: Decay,
    ) -> None:
        if not callable(decay) and not 0.0 <= decay < 1.0:
            raise ConfigError(
                f"ema(decay={decay}) is outside [0, 1): the average keeps this fraction of itself at every update; 0.999 is usual."
            )
        for optimizer in optimizers:
            if isinstance(optimizer.optimizer, EngineOptimizer):
                raise ConfigError(
                    f"ema() does not work with {type(optimizer.optimizer).__name__}: the engine holds the weights in a layout of "
                    "its own, so that they cannot be averaged beside it. Use strategy='ddp' or 'fsdp'."
                )
        self._model = model
        self._decay = decay
        model_ids = {id(p) for p in model.parameters() if p.is_floating_point()}
        self._averaged_by: list[tuple[PreparedOptimizer, str, list[Tensor]]] = []
        """Optimizers that update averaged parameters, each with its key in the state and these parameters."""
        for index, optimizer in enumerate(optimizers):
            parameters = [p for p in optimizer.parameters if id(p) in model_ids]
            if parameters:
                self._averaged_by.append((optimizer, str(index), parameters))
        if not self._averaged_by:
            raise ConfigError(
                f"ema() was called for {type(model).__name__}, none of whose parameters is in a prepared optimizer, so the "
                "average would never change. Call ema() after prepare() with the model that prepare() returned, and "
                "prepare its optimizer as well."
            )
        self.state = AverageState([p for _, _, ps in self._averaged_by for p in ps])
        self.state.num_updates = {key: 0 for _, key, _ in self._averaged_by}

    @property
    def num_updates(self) -> int:
        """Number of optimizer updates that the average has seen."""
        return max(self.state.num_updates.values())

    def after_update(self, optimizer: Holder, applied: bool) -> None:
        """Average the parameters of an optimizer after an applied update."""
        for owner, key, parameters in self._averaged_by:
            if applied and owner is optimizer:
                self._update(key, parameters)

    @torch.no_grad()
    def _update(self, key: str, parameters: Sequence[Tensor]) -> None:
        """Average the parameters of one optimizer after its update."""
        if self.state.swapped:
            raise StepError(
                "an optimizer was stepped inside `with ema.swapped():`, where the model holds the averaged weights; the "
                "update would be lost at the end of the block. Train outside the block."
            )
        self.state.num_updates[key] += 1
        decay = self._decay
        if callable(decay):
            decay = decay(self.state.num_updates[key])
        averages = [self.state.average(parameter) for parameter in parameters]
        current = [
            local_tensor(parameter.detach()).to(torch.float32)
            for parameter in parameters
        ]
        torch._foreach_lerp_(averages, current, 1.0 - decay)

    @contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """Return a context manager in which the model holds the averaged weights, for evaluation and export.

        The training weights return at the end of the block, bit for bit; buffers keep their current values.
        Ranks: every rank that holds a shard.
        """
        if self.state.swapped:
            raise StepError(
                "`ema.swapped()` was entered twice; the inner block would swap the weights back."
            )
        pairs = [
            (local_tensor(parameter.detach()), self.state.average(parameter))
            for parameter in self.state.param_groups[0]["params"]
        ]
        trained_values = [value.clone() for value, _ in pairs]
        self.state.swapped = True
        try:
            with torch.no_grad():
                for value, average in pairs:
                    value.copy_(average)
            yield self._model
        finally:
            with torch.no_grad():
                for (value, _), trained_value in zip(
                    pairs, trained_values, strict=True
                ):
                    value.copy_(trained_value)
            self.state.swapped = False
