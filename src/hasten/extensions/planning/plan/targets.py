"""Targets of a plan: a script, a function that returns a model, or a model's folder, each as a loop to trace."""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from hasten.accelerator.facade import Accelerator
from hasten.errors import ConfigError
from hasten.optional import need
from hasten.trees import map_tensors, tensors

TrainingLoop = Callable[[], object]
_MAX_TOKENS: Final = 4096
"""Maximum tokens of a sample if neither the request nor the model specifies fewer."""


def find_loop(
    target: str,
    arguments: Sequence[str] = (),
    sequence: int | None = None,
) -> tuple[TrainingLoop, str]:
    """Return the training loop of a target, and the target's name.

    Raises: ConfigError for a target that is neither a script, nor a function, nor a folder.
    """
    path = Path(target)
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            raise ConfigError(
                f"the script {target!r} does not exist; the current folder is {Path.cwd()}."
            )
        return (lambda: run_script(path, arguments)), path.name
    if path.is_dir():
        return (lambda: _train_plainly(*_from_folder(path, sequence))), path.name
    if ":" in target:
        return (lambda: _train_plainly(*_from_factory(target, sequence))), target
    raise ConfigError(
        f"{target!r} is neither a script, nor module:function, nor a folder with a config.json; give one of them."
    )


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """Run a script as `python path arguments` does."""
    with _set_arguments([str(path), *arguments]), _import_from(path.parent):
        runpy.run_path(str(path), run_name="__main__")


@contextmanager
def _set_arguments(new_arguments: list[str]) -> Iterator[None]:
    previous_arguments = sys.argv
    sys.argv = new_arguments
    try:
        yield
    finally:
        sys.argv = previous_arguments


@contextmanager
def _import_from(folder: Path) -> Iterator[None]:
    """Make modules next to a script importable, as `python script.py` does."""
    sys.path.insert(0, str(folder.absolute()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.absolute()))


# Any: arguments of the model's forward, for one sample
Sample = tuple[tuple[Any, ...], dict[str, Any]]


def _from_factory(target: str, sequence: int | None) -> tuple[nn.Module, Sample]:
    module_name, _, function_name = target.partition(":")
    with _import_from(Path.cwd()):
        try:
            # the user's module, named on the command line
            factory_output = getattr(import_module(module_name), function_name)()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{target!r} cannot be built: {error}. Write module:function, found from this folder."
            ) from error
    if isinstance(factory_output, nn.Module):
        return factory_output, _sample_for(factory_output, target, sequence)
    if (
        isinstance(factory_output, tuple)
        and factory_output
        and isinstance(factory_output[0], nn.Module)
    ):
        model, *inputs = factory_output
        positional_inputs = []
        keyword_inputs: dict[str, Any] = {}
        for model_input in inputs:
            if isinstance(model_input, dict):
                keyword_inputs |= model_input
            else:
                positional_inputs.append(model_input)
        return model, (tuple(positional_inputs), keyword_inputs)
    raise ConfigError(
        f"{target!r} returns {type(factory_output).__name__}; return the model, or the model and the inputs of one sample."
    )


def _from_folder(path: Path, sequence: int | None) -> tuple[nn.Module, Sample]:
    transformers = need("transformers", why="models described by a config.json")
    try:
        model_config = transformers.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} contains no model that transformers supports ({str(error).splitlines()[0]}); give a folder with a config.json."
        ) from error
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(model_config)
    return model, _sample_for(model, str(path), sequence)


def _sample_for(model: nn.Module, target: str, sequence: int | None) -> Sample:
    """Return one sample for a language model of transformers: tokens, which are its labels too."""
    model_config: Any = getattr(
        model, "config", None
    )  # Any: a configuration of transformers
    accepted_arguments = inspect.signature(model.forward).parameters
    if not {"input_ids", "labels"} <= accepted_arguments.keys():
        raise ConfigError(
            f"{target!r} returns a {type(model).__name__} without inputs, so no step can be traced; return the model and the "
            "inputs of one sample."
        )
    max_tokens = getattr(model_config, "max_position_embeddings", None) or _MAX_TOKENS
    tokens = torch.zeros(1, sequence or min(max_tokens, _MAX_TOKENS), dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if "use_cache" in accepted_arguments:
        inputs["use_cache"] = False
    return (), inputs


class _Rows(Dataset[Any]):
    """Dataset that repeats one sample."""

    def __init__(self, sample: Any) -> None:  # Any: a tree of tensors
        self._sample = map_tensors(
            lambda tensor: tensor[0] if tensor.dim() else tensor, sample
        )

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self._sample


def _train_plainly(model: nn.Module, sample: Sample) -> None:
    """Train a model in a plain loop with AdamW; if its output is not and has no loss, the mean of the output is the loss."""
    positional_inputs, keyword_inputs = sample
    tensor_inputs = {}
    fixed_inputs = {}
    for name, model_input in keyword_inputs.items():
        if isinstance(model_input, Tensor):
            tensor_inputs[name] = model_input
        else:
            fixed_inputs[name] = model_input
    accelerator = Accelerator()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(_Rows([list(positional_inputs), tensor_inputs]), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for positional_batch, keyword_batch in loader:
        loss = _find_loss(model(*positional_batch, **keyword_batch, **fixed_inputs))
        accelerator.backward(loss)
        optimizer.step()


def _find_loss(model_output: Any) -> Tensor:  # Any: the output of any model
    if isinstance(model_output, dict):
        loss = model_output.get("loss")
    else:
        loss = getattr(model_output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    float_tensors = [
        tensor for tensor in tensors(model_output) if tensor.is_floating_point()
    ]
    if not float_tensors:
        raise ConfigError(
            "the model returns no floating-point tensor, so there is no loss; return a loss or a floating-point output."
        )
    return float_tensors[0].float().mean()
