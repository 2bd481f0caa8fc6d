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
from hasten.extensions.bigmodel.device_map import module_nodes
from hasten.extensions.bigmodel.placement_plan import group_modules
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
        return _shape_of_factory(target)
    if path.exists() and (_has_weights(path) or not (path / "config.json").is_file()):
        return _shape_of_files(path)
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
        return shape_of_model(model, target)
    raise ConfigError(
        f"{target!r} is neither a folder of weights nor module:function. Install transformers for models of the Hub."
    )


def _shape_of_factory(target: str) -> ModelShape:
    module_name, _, function = target.partition(":")
    if (working_folder := str(Path.cwd())) not in sys.path:
        # like `python script.py`, which finds modules in the script's folder
        sys.path.insert(0, working_folder)
    try:
        # the user's module, named on the command line
        build_model = getattr(import_module(module_name), function)
        with init_empty_weights():
            built_model = build_model()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{target!r} cannot be built: {error}. Write module:function, found from this folder."
        ) from error
    if isinstance(built_model, tuple):
        built_model = built_model[0]
    return shape_of_model(built_model, target)


def _has_weights(path: Path) -> bool:
    try:
        return bool(weight_files(path))
    except CheckpointError:
        return False


def _shape_of_files(path: Path) -> ModelShape:
    """Return sizes read from the headers of weight files alone."""
    num_elements: dict[str, int] = {}
    for file in weight_files(path):
        num_elements.update(
            {
                name: piece.data.numel()
                for name, piece in read_tensors(file).pieces.items()
            }
        )
    block_elements: dict[str, int] = {}
    for name, count in num_elements.items():
        block_match = _BLOCK.match(name)
        key = block_match.group(1) if block_match else name.rpartition(".")[0]
        block_elements[key] = block_elements.get(key, 0) + count
    return ModelShape(
        str(path), sum(num_elements.values()), max(block_elements.values(), default=0)
    )


def shape_of_model(model: nn.Module, name: str) -> ModelShape:
    """Return the sizes of a model."""
    blocks = {type(block).__name__ for block in repeated_blocks(model)}
    width = next((parameter.element_size() for parameter in model.parameters()), 4)
    count = sum(parameter.numel() for parameter in model.parameters())
    sizes = []
    for module_group in group_modules(module_nodes(model, blocks)):
        sizes.append(module_group.num_bytes // width)
    return ModelShape(name, count, max(sizes, default=0))


def estimate_memory(shape: ModelShape, dtype: str, optimizer: str = "adam") -> Estimate:
    """Return the bytes of one process.

    Mixed precision keeps the master weights, gradients and optimizer states in fp32.
    """
    bits = dict(BITS).get(dtype)
    num_states = dict(_STATES).get(optimizer)
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
