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

Loop = Callable[[], object]
_LONGEST: Final = 4096
"""Maximum tokens of a sample if neither the request nor the model specifies fewer."""


def loop_of(
    target: str,
    arguments: Sequence[str] = (),
    sequence: int | None = None,
) -> tuple[Loop, str]:
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
        return (lambda: _train(*_from_folder(path, sequence))), path.name
    if ":" in target:
        return (lambda: _train(*_from_factory(target, sequence))), target
    raise ConfigError(
        f"{target!r} is neither a script, nor module:function, nor a folder with a config.json; give one of them."
    )


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """Run a script as `python path arguments` does."""
    with _arguments([str(path), *arguments]), _beside(path.parent):
        runpy.run_path(str(path), run_name="__main__")


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Make modules next to a script importable, as `python script.py` does."""
    sys.path.insert(0, str(folder.absolute()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.absolute()))


# Any: arguments of the model's forward, for one sample
Sample = tuple[tuple[Any, ...], dict[str, Any]]


def _from_factory(target: str, sequence: int | None) -> tuple[nn.Module, Sample]:
    name, _, function = target.partition(":")
    with _beside(Path.cwd()):
        try:
            # the user's module, named on the command line
            made = getattr(import_module(name), function)()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{target!r} cannot be built: {error}. Write module:function, found from this folder."
            ) from error
    if isinstance(made, nn.Module):
        return made, _sample_for(made, target, sequence)
    if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
        model, *inputs = made
        named = {
            name: value
            for part in inputs
            if isinstance(part, dict)
            for name, value in part.items()
        }
        return model, (
            tuple(part for part in inputs if not isinstance(part, dict)),
            named,
        )
    raise ConfigError(
        f"{target!r} returns {type(made).__name__}; return the model, or the model and the inputs of one sample."
    )


def _from_folder(path: Path, sequence: int | None) -> tuple[nn.Module, Sample]:
    library = need("transformers", why="models described by a config.json")
    try:
        config = library.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} contains no model that transformers supports ({str(error).splitlines()[0]}); give a folder with a config.json."
        ) from error
    model: nn.Module = library.AutoModelForCausalLM.from_config(config)
    return model, _sample_for(model, str(path), sequence)


def _sample_for(model: nn.Module, target: str, sequence: int | None) -> Sample:
    """Return one sample for a language model of transformers: tokens, which are its labels too."""
    config: Any = getattr(model, "config", None)  # Any: a configuration of transformers
    accepted = inspect.signature(model.forward).parameters
    if not {"input_ids", "labels"} <= accepted.keys():
        raise ConfigError(
            f"{target!r} returns a {type(model).__name__} without inputs, so no step can be traced; return the model and the "
            "inputs of one sample."
        )
    longest = getattr(config, "max_position_embeddings", None) or _LONGEST
    tokens = torch.zeros(1, sequence or min(longest, _LONGEST), dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if "use_cache" in accepted:
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


def _train(model: nn.Module, sample: Sample) -> None:
    """Train a model in a plain loop with AdamW; if its output is not and has no loss, the mean of the output is the loss."""
    args, named = sample
    rows = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    fixed = {name: value for name, value in named.items() if name not in rows}
    accelerator = Accelerator()
    updates = AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(_Rows([list(args), rows]), batch_size=2)
    model, updates, loader = accelerator.prepare(model, updates, loader)
    model.train()
    for given, words in loader:
        loss = _loss(model(*given, **words, **fixed))
        accelerator.backward(loss)
        updates.step()


def _loss(output: Any) -> Tensor:  # Any: the output of any model
    loss = (
        output.get("loss")
        if isinstance(output, dict)
        else getattr(output, "loss", None)
    )
    if isinstance(loss, Tensor):
        return loss
    numbers = [value for value in tensors(output) if value.is_floating_point()]
    if not numbers:
        raise ConfigError(
            "the model returns no floating-point tensor, so there is no loss; return a loss or a floating-point output."
        )
    return numbers[0].float().mean()
