"""Refusals: names that the original has and this package leaves out on purpose, each with its reason, and the original itself."""

from __future__ import annotations

from importlib import metadata
from typing import Any, Final, NoReturn

from accelerate._impl.surface.messages import message

MEGATRON_STEPS: Final = "inner steps of the original's Megatron engine; Accelerator(megatron_lm_plugin=...) trains GPT-2 and Llama models of transformers as they are"
MARK: Final = "__left_out__"


def refuse_use(name: str, why: str) -> NoReturn:
    raise NotImplementedError(message("left_out", name, why))


# Any: stands for a function of any signature
def function(name: str, why: str = MEGATRON_STEPS) -> Any:

    def refusing_class(*args: Any, **kwargs: Any) -> NoReturn:
        refuse_use(name, why)

    refusing_class.__name__ = refusing_class.__qualname__ = name.rpartition(".")[2]
    refusing_class.__doc__ = f"Left out: {why}."
    setattr(refusing_class, MARK, why)
    return refusing_class


# Any: stands for a class
def klass(name: str, *bases: type, why: str = MEGATRON_STEPS) -> Any:
    """Return a class that can be named in annotations and isinstance(), but not instantiated."""

    def refused_name(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_use(name, why)

    home, _, short = f"accelerate.{name}".rpartition(".")
    inside = {
        "__init__": refused_name,
        "__doc__": f"Left out: {why}.",
        "__module__": home,
        MARK: why,
    }
    return type(short, bases or (object,), inside)


def refuse_other_package() -> None:
    """Raise when another distribution named `accelerate` shares this one's folder: modules of both would be mixed."""
    for distribution in metadata.distributions(name="accelerate"):
        if "hasten" not in (distribution.requires or ()):
            raise ImportError(
                message(
                    "other_package", distribution.version, distribution.locate_file("")
                )
            )
