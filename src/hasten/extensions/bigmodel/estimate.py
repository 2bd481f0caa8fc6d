"""Memory estimates of a model before it is loaded: weights, gradients, optimizer states and activations."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from torch import nn

from hasten.checkpoint.export import weight_files
from hasten.checkpoint.format.formats import read_tensors
from hasten.errors import CheckpointError, ConfigError
from hasten.extensions.bigmodel.device_map import tree
from hasten.extensions.bigmodel.placement_plan import atoms
from hasten.modules.meta import init_empty_weights
from hasten.modules.surgery import repeated_blocks
from hasten.optional import available, need

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
_BLOCK = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of elements in all parameters of a model and in its largest block."""

    name: str
    num_parameters: int
    largest: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of the largest block, of all weights, and of training without activations, in one precision."""

    dtype: str
    largest: int
    weights: int
    training: int


def shape_of(target: str, trust_remote_code: bool = False) -> ModelShape:
    """Return the sizes of a folder of weights, of the model built by `module:function`, or of a model on the Hub.

    A transformers folder without weights is built from its config.json.
    Raises: ConfigError if the target is none of these.
    """
    path = Path(target)
    if ":" in target and not path.exists():
        return _of_factory(target)
    if path.exists() and (_has_weights(path) or not (path / "config.json").is_file()):
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
        return of_model(model, target)
    raise ConfigError(
        f"{target!r} is neither a folder of weights nor module:function. Install transformers for models of the Hub."
    )


def _of_factory(target: str) -> ModelShape:
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
    return of_model(made[0] if isinstance(made, tuple) else made, target)


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


def of_model(model: nn.Module, name: str) -> ModelShape:
    """Return the sizes of a model."""
    blocks = {type(block).__name__ for block in repeated_blocks(model)}
    width = next((parameter.element_size() for parameter in model.parameters()), 4)
    count = sum(parameter.numel() for parameter in model.parameters())
    sizes = [part.num_bytes // width for part in atoms(tree(model, blocks))]
    return ModelShape(name, count, max(sizes, default=0))


def estimate(shape: ModelShape, dtype: str, optimizer: str = "adam") -> Estimate:
    """Return the bytes of one process.

    Mixed precision keeps the master weights, gradients and optimizer states in fp32.
    """
    bits, num_states = dict(BITS).get(dtype), dict(_STATES).get(optimizer)
    if bits is None or num_states is None:
        raise ConfigError(
            f"dtype {dtype!r} with optimizer {optimizer!r} cannot be estimated; dtypes are {', '.join(dict(BITS))}, optimizers "
            f"{', '.join(dict(_STATES))}."
        )
    return Estimate(
        dtype=dtype,
        largest=shape.largest * bits // 8,
        weights=shape.num_parameters * bits // 8,
        training=shape.num_parameters * 4 * (2 + num_states),
    )
