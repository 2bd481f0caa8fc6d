"""Memory estimates of a model before it is loaded: weights, gradients, optimizer states and activations."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hasten.checkpoint.export import weight_files
from hasten.checkpoint.format.formats import read_tensors
from hasten.errors import CheckpointError, ConfigError
from hasten.extensions.bigmodel.device_map import tree
from hasten.extensions.bigmodel.placement_plan import atoms
from hasten.modules.meta import init_empty_weights
from hasten.modules.surgery import repeated_blocks
from hasten.optional import available, need
from hasten.trees import tensors

BITS: Final = (
    ("float32", 32),
    ("float16", 16),
    ("bfloat16", 16),
    ("float8", 8),
    ("int8", 8),
    ("int4", 4),
)
_STATES: Final = (
    ("adam", 2),
    ("adamw", 2),
    ("sgd", 0),
    ("momentum", 1),
    ("adafactor", 0),
)
"""Number of fp32 values per parameter in the optimizer's state."""
STRATEGIES: Final = ("ddp", "zero1", "zero2", "fsdp2")
"""Sharded among processes: nothing, the optimizer's states, gradients as well, weights as well."""
# blocks gathered at a time when weights are sharded: the computing one and the next one
_GATHERED = 2
_BLOCK = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model: numbers of elements in all parameters and in its largest block, and activations per sample."""

    name: str
    num_parameters: int
    largest: int
    activation_numbers: int | None = None
    """Number of elements that autograd saves for one sample; None if no inputs were given to trace."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of one process, in one precision under one strategy."""

    dtype: str
    strategy: str
    largest: int
    weights: int
    gradients: int
    optimizer: int
    activations: int | None
    gathered: int
    """Bytes of the blocks that are gathered at a time, where weights are sharded."""
    total: int
    largest_batch: int | None = None


def shape_of(
    target: str, inputs: Sequence[tuple[int, ...]] = (), trust_remote_code: bool = False
) -> ModelShape:
    """Return the sizes of a folder of weights, of the model built by `module:function`, or of a model on the Hub.

    A transformers folder with a config.json is built from the config if `inputs` are given or it has no weights.
    Raises: ConfigError if the target is none of these.
    """
    path = Path(target)
    if ":" in target and not path.exists():
        return _of_factory(target, inputs)
    if path.exists() and not (
        (path / "config.json").is_file() and (inputs or not _has_weights(path))
    ):
        if inputs:
            raise ConfigError(
                f"{target!r} contains weights but no config.json, so inputs cannot be traced. Remove --input, or give module:function."
            )
        return _of_files(path)
    if available("transformers"):
        library = need("transformers", why="models of the Hub")
        try:
            config = library.AutoConfig.from_pretrained(
                target, trust_remote_code=trust_remote_code
            )
            with init_empty_weights():
                model: nn.Module = library.AutoModel.from_config(
                    config, trust_remote_code=trust_remote_code
                )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{target!r} is neither a folder nor a model on the Hub ({str(error).splitlines()[0]}). "
                "Give a folder with weights, a model's name, or module:function."
            ) from error
        return of_model(model, target, inputs)
    raise ConfigError(
        f"{target!r} is neither a folder of weights nor module:function. Install transformers for models of the Hub."
    )


def _of_factory(target: str, inputs: Sequence[tuple[int, ...]]) -> ModelShape:
    module_name, _, function = target.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        # like `python script.py`, which finds modules in the script's folder
        sys.path.insert(0, here)
    try:
        # the user's module, named on the command line
        make = getattr(import_module(module_name), function)
        with init_empty_weights():
            made = make()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{target!r} cannot be built: {error}. Write module:function, found from this folder."
        ) from error
    if isinstance(made, tuple):  # the model, and inputs of one sample
        return of_model(made[0], target, (), made[1:])
    return of_model(made, target, inputs)


def _has_weights(path: Path) -> bool:
    try:
        return bool(weight_files(path))
    except CheckpointError:
        return False


def _of_files(path: Path) -> ModelShape:
    """Return sizes read from the headers of weight files alone."""
    numbers: dict[str, int] = {}
    for file in weight_files(path):
        numbers.update(
            {
                name: piece.data.numel()
                for name, piece in read_tensors(file).pieces.items()
            }
        )
    groups: dict[str, int] = {}
    for name, count in numbers.items():
        found = _BLOCK.match(name)
        key = found.group(1) if found else name.rpartition(".")[0]
        groups[key] = groups.get(key, 0) + count
    return ModelShape(str(path), sum(numbers.values()), max(groups.values(), default=0))


def of_model(
    model: nn.Module,
    name: str,
    inputs: Sequence[tuple[int, ...]] = (),
    example: Sequence[Any] = (),
) -> ModelShape:  # Any: the model's arguments
    """Return the sizes of a model, with the activations of one sample if its shape or an example is given."""
    blocks = {type(block).__name__ for block in repeated_blocks(model)}
    parts = atoms(tree(model, blocks))
    width = next((parameter.element_size() for parameter in model.parameters()), 4)
    count = sum(parameter.numel() for parameter in model.parameters())
    samples = list(example) or [
        torch.zeros(shape, dtype=torch.long) for shape in inputs
    ]
    kept = _trace(model, samples) if samples else None
    return ModelShape(
        name, count, max((part.num_bytes // width for part in parts), default=0), kept
    )


def _trace(model: nn.Module, samples: Sequence[Any]) -> int:
    """Return the number of elements that autograd saves in a forward on meta tensors, without parameters."""
    model = model.to("meta").train()
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[tuple[int, tuple[int, ...]], int] = {}
    alive: list[Tensor] = []  # an id is unique only while its tensor lives

    def note(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in own:
            alive.append(base)
            kept[id(base), tuple(base.shape)] = base.numel()
        return tensor

    moved = [
        sample.to("meta") if isinstance(sample, Tensor) else sample
        for sample in samples
    ]
    with saved_tensors_hooks(note, lambda tensor: tensor), torch.enable_grad():
        output = model(*moved)
    rows = next((sample.shape[0] for sample in tensors(moved) if sample.dim()), 1)
    assert output is not None, "a forward has an output"
    return sum(kept.values()) // max(rows, 1)


def estimate(
    shape: ModelShape,
    dtype: str,
    optimizer: str = "adam",
    batch: int = 1,
    sharded: int = 1,
    device_bytes: int | None = None,
    strategy: str = "fsdp2",
) -> Estimate:
    """Return the bytes of one of `sharded` processes, under the sharding of the strategy.

    Mixed precision keeps the master weights, gradients and optimizer states in fp32, and activations in `dtype`.
    """
    bits = dict(BITS).get(dtype)
    states = dict(_STATES).get(optimizer)
    if bits is None or states is None or strategy not in STRATEGIES:
        raise ConfigError(
            f"dtype {dtype!r} with optimizer {optimizer!r} under {strategy!r} cannot be estimated; dtypes are "
            f"{', '.join(dict(BITS))}, optimizers {', '.join(dict(_STATES))}, strategies {', '.join(STRATEGIES)}."
        )
    level = STRATEGIES.index(strategy)
    whole = shape.num_parameters * 4
    optimizer_bytes, gradients, weights = (
        (whole // sharded if level >= needed else whole) * times
        for needed, times in ((1, states), (2, 1), (3, 1))
    )
    largest = shape.largest * bits // 8
    gathered = _GATHERED * largest if weights < whole else 0
    sample = (
        None
        if shape.activation_numbers is None
        else shape.activation_numbers * max(bits, 16) // 8
    )
    held = weights + gradients + optimizer_bytes + gathered
    return Estimate(
        dtype=dtype,
        strategy=strategy,
        largest=largest,
        weights=shape.num_parameters * bits // 8,
        gradients=gradients,
        optimizer=optimizer_bytes,
        activations=None if sample is None else sample * batch,
        gathered=gathered,
        total=held + (sample or 0) * batch,
        largest_batch=max((device_bytes - held) // sample, 0)
        if device_bytes is not None and sample
        else None,
    )
