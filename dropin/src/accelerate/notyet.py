"""Names that resolve but do nothing yet: using one raises a clear NotImplementedError."""

from __future__ import annotations

from typing import Any, NoReturn

BIG_MODELS = "loading and offloading big models"
DEEPSPEED = "DeepSpeed"
MEGATRON = "Megatron-LM"
XLA = "training on TPUs"
SAGEMAKER = "Amazon SageMaker"

_MARK = "__not_yet__"


def refuse(name: str, part: str) -> NoReturn:
    """Raise the error for a name whose part of the library is still to come."""
    raise NotImplementedError(
        f"accelerate.{name} is not in this version of hasten's stand-in yet: it belongs to {part}, which follows later. "
        "Nothing was done in its place. Use the original accelerate package for it, or leave it out."
    )


def function(name: str, part: str) -> Any:  # Any: stands for a function of any signature
    """A function that refuses."""

    def later(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, part)

    later.__name__ = later.__qualname__ = name.rpartition(".")[2]
    later.__doc__ = f"Not yet: {part}."
    setattr(later, _MARK, part)
    return later


def klass(name: str, part: str, *bases: type) -> Any:  # Any: stands for a class
    """A class that can be named in annotations and isinstance(), but not instantiated."""

    def refused(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse(name, part)

    home, _, short = f"accelerate.{name}".rpartition(".")
    inside = {"__init__": refused, "__doc__": f"Not yet: {part}.", "__module__": home, _MARK: part}
    return type(short, bases or (object,), inside)


def is_not_yet(value: object) -> bool:
    """Whether a name only resolves."""
    return bool(vars(value).get(_MARK)) if hasattr(value, "__dict__") else False
