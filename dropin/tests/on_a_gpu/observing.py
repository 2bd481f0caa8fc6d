"""Observations: functions that note what the package named accelerate does here, as JSON, and how two notes are compared.

A part (`observed_*.py`) holds functions marked with @observe; each is given a `Seen` and notes values by name. A function
that is given instead of a value is called, and the exception it ends with is noted in its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import logging
import math
import os
import random
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DEVICE = os.environ.get("OBSERVED_DEVICE", "cpu")
CUDA = DEVICE == "cuda"
GPU: int | str = 0 if CUDA else "cpu"
"""The device as maps name it."""
TOLERANCE = 1e-5
# what torch says when parts of it are imported
IMPORTING = ("`torch.jit", "'set_vital'")
NUM_NOTED_VALUES = 48  # values of a tensor that are noted

Json = Any  # Any: JSON


class Seen:
    """What one function noted, each value told to `tell` at once."""

    def __init__(self, tell: Callable[[str, Json], None] | None = None) -> None:
        self.values: dict[str, Json] = {}
        self.tell = tell

    def __call__(self, name: str, subject: object) -> None:
        """Note a value, or what a function returns or raises."""
        if isinstance(subject, types.FunctionType):
            try:
                subject = subject()
            except Exception as error:
                subject = error
        self.values[name] = noted(subject)
        if self.tell is not None:
            self.tell(name, self.values[name])


@dataclasses.dataclass(frozen=True)
class Observation:
    """One function, and how long it may take."""

    name: str
    group: str
    run: Callable[[Seen], None]
    limit: float
    cuda: bool


OBSERVATIONS: list[Observation] = []


def observe(
    group: str, limit: float = 45, cuda: bool = False
) -> Callable[[Callable[[Seen], None]], Callable[[Seen], None]]:
    """Mark a function as an observation; with `cuda` it is left out where there is none."""

    def mark(run: Callable[[Seen], None]) -> Callable[[Seen], None]:
        OBSERVATIONS.append(Observation(run.__name__, group, run, limit, cuda))
        return run

    return mark


def observed(observation: Observation, tell: Callable[[str, Json], None]) -> None:
    """Tell what a function notes, with its warnings and log lines."""
    see = Seen(tell)
    variables = dict(os.environ)
    previous_folder = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, listening() as messages:
        os.chdir(folder)
        seeded()
        try:
            observation.run(see)
        except Exception as error:
            see("ended", error)
        os.chdir(previous_folder)
    see("told", messages)
    os.environ.clear()
    os.environ.update(variables)
    reset()


def seeded(seed: int = 11) -> None:
    """Seed every generator."""
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed)
    torch.manual_seed(seed)


def reset() -> None:
    """Forget the states of the package, and what a function may have left in torch."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if CUDA:
        # an error that a kernel left behind ends this process here, not in the next function
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def listening() -> Iterator[dict[str, list[Json]]]:
    """The warnings and the log lines inside the block, each once."""
    messages: dict[str, list[Json]] = {"warnings": [], "log": []}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = [record.levelname, record.name, plain(record.getMessage())]
            if line not in messages["log"]:
                messages["log"].append(line)

    handler = Handler(logging.WARNING)
    logging.getLogger().addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield messages
        finally:
            logging.getLogger().removeHandler(handler)
    ignored = (ResourceWarning, ImportWarning)
    lines = {
        (caught_warning.category.__name__, plain(str(caught_warning.message)))
        for caught_warning in caught
        if not issubclass(caught_warning.category, ignored)
    }
    messages["warnings"] = [list(line) for line in sorted(lines)]


def plain(text: str) -> str:
    """A text without what differs from one process to the next: folders, addresses, times."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"(/[\w.@+-]+)+/site-packages", "SITE", text)
    text = re.sub(re.escape(tempfile.gettempdir()) + r"(/[\w.-]+)*", "FOLDER", text)
    text = text.replace(sys.prefix, "ENVIRONMENT").replace("1.15.0+hasten", "1.15.0")
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"\(pid=\d+\)", "(pid=)", text)
    return text if len(text) < 400 else text[:400] + "…"


# -- values as JSON --------------------------------------------------------------------------------------------------
def noted(value: object) -> Json:
    """A value as JSON; what has no form of its own is noted by its class."""
    if value is None or (
        isinstance(value, bool | int) and not isinstance(value, enum.Enum)
    ):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, BaseException):
        return {"raised": type(value).__name__, "says": plain(str(value))}
    if isinstance(value, Tensor):
        return _tensor(value)
    return _collection(value)


def _tensor(value: Tensor) -> Json:
    note: dict[str, Json] = {
        "tensor": type(value).__name__,
        "dtype": str(value.dtype),
        "device": str(value.device),
    }
    note |= {"shape": list(value.shape), "grad": value.requires_grad}
    if value.device.type != "meta" and not value.is_nested:
        numbers = value.detach().to("cpu").flatten()
        if not numbers.is_complex():
            numbers = numbers.double()
            note["sum"] = noted(numbers.sum().item())
            note["values"] = [
                noted(number) for number in numbers[:NUM_NOTED_VALUES].tolist()
            ]
    return note


def _collection(value: object) -> Json:
    if isinstance(value, Mapping):
        return {str(key): noted(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        name = type(value).__name__
        return (
            [noted(child) for child in value]
            if name == "list"
            else {name: [noted(child) for child in value]}
        )
    if isinstance(value, set | frozenset):
        return sorted(str(noted(child)) for child in value)
    if isinstance(value, torch.dtype | torch.device | torch.Size | Path):
        return plain(str(value))
    if isinstance(value, type):
        return f"class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"function {value.__name__}"
    return f"object {type(value).__name__}"


# -- two notes beside each other -------------------------------------------------------------------------------------
def apart(original: Json, dropin: Json) -> str:
    """`equal`, `words` where one exception, warning or log line is told in other words, or `different`."""
    if isinstance(original, dict) and isinstance(dropin, dict):
        if original.keys() != dropin.keys():
            return "different"
        if "raised" in original:
            if original["raised"] != dropin["raised"]:
                return "different"
            return "equal" if original["says"] == dropin["says"] else "words"
        return _worst(apart(original[key], dropin[key]) for key in original)
    if isinstance(original, list) and isinstance(dropin, list):
        if len(original) != len(dropin):
            return "different"
        return _worst(
            apart(original_child, dropin_child)
            for original_child, dropin_child in zip(original, dropin, strict=True)
        )
    if (
        isinstance(original, float)
        and isinstance(dropin, float | int)
        and not isinstance(dropin, bool)
    ):
        return (
            "equal"
            if abs(original - dropin) <= TOLERANCE * max(1e-2, abs(original))
            else "different"
        )
    return (
        "equal"
        if original == dropin and type(original) is type(dropin)
        else "different"
    )


def _worst(kinds: Iterator[str]) -> str:
    return max(kinds, key=("equal", "words", "different").index, default="equal")


def where_apart(
    original: Json, dropin: Json, path: str = ""
) -> Iterator[tuple[str, Json, Json]]:
    """The smallest parts that are not equal, with their places."""
    if apart(original, dropin) == "equal":
        return
    is_leaf = any(
        isinstance(note, dict) and ("raised" in note or "tensor" in note)
        for note in (original, dropin)
    )
    if not is_leaf and isinstance(original, dict) and isinstance(dropin, dict):
        for key in dict.fromkeys([*original, *dropin]):
            missing = "(nothing)"
            yield from where_apart(
                original.get(key, missing),
                dropin.get(key, missing),
                f"{path}.{key}".lstrip("."),
            )
    elif (
        isinstance(original, list)
        and isinstance(dropin, list)
        and len(original) == len(dropin)
    ):
        for index, (original_child, dropin_child) in enumerate(
            zip(original, dropin, strict=True)
        ):
            yield from where_apart(original_child, dropin_child, f"{path}[{index}]")
    else:
        yield path, original, dropin


# -- what several parts use ------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Two linear layers with a norm between them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 4)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        self.seen.append(str(inner.dtype))
        out: Tensor = self.last(torch.relu(self.norm(inner)))
        return out


def dataset(rows: int = 16) -> list[dict[str, Tensor]]:
    """Rows of one seed."""
    generator = torch.Generator().manual_seed(5)
    return [
        {"x": torch.randn(8, generator=generator), "y": torch.tensor(index % 4)}
        for index in range(rows)
    ]


def loader(
    rows: int = 16, batch: int = 4, **options: Any
) -> torch.utils.data.DataLoader[Any]:
    """A loader of these rows."""
    return torch.utils.data.DataLoader(dataset(rows), batch_size=batch, **options)


def batch(rows: int = 4) -> Tensor:
    """A batch on the device."""
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(3)).to(DEVICE)


def parts(
    seed: int = 1, rows: int = 16, lr: float = 0.1
) -> tuple[Net, torch.optim.Optimizer, Any, Any]:
    """A model, its optimizer, a loader and a scheduler."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return (
        model,
        optimizer,
        loader(rows),
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )


def loss_of(model: nn.Module, samples: Mapping[str, Tensor]) -> Tensor:
    """The loss of a batch."""
    return nn.functional.cross_entropy(model(samples["x"]), samples["y"])


def checksum(model: nn.Module) -> float:
    """A number that tells the weights."""
    return sum(
        float((parameter.detach().double().cpu() * (index + 1)).sum())
        for index, parameter in enumerate(model.parameters())
    )


def files_in(folder: str | Path) -> list[str]:
    """The files of a folder by their names inside it, without hidden ones."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in files]
    return sorted(
        name
        for name in names
        if not any(name_part.startswith(".") for name_part in name.split("/"))
    )
