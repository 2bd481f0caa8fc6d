"""Lazy exports (PEP 562) of the public modules: a table of names, each imported from its module on first use."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec


def exports(
    face: str,
    table: Mapping[str, str],
    modules: tuple[str, ...] = (),
    extensible: bool = False,
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the public module `face`.

    `table` maps each name to its defining module; `modules` are submodules that an attribute access imports as well. An `extensible`
    module has the public names of extensions, too.
    """

    def load(name: str) -> object:
        """Import the module that defines `name` and cache the attribute for later accesses."""
        if name in modules:
            return import_module(f"{face}.{name}")
        module = table.get(name)
        if module is None:
            # `from hasten import trees` asks for the attribute before it imports the submodule
            is_unknown = (
                not name.startswith("_") and find_spec(f"{face}.{name}") is None
            )
            if extensible and is_unknown:
                from hasten.extension import (
                    # looks at folders and installed packages, which `import hasten` need not
                    offers,
                )

                if (offer := offers("public_names").get(name)) is not None:
                    return offer.load()
            if is_unknown:
                other_modules = [f"{face}.{module_name}" for module_name in modules]
            else:
                other_modules = []
            home = None
            for other in other_modules:
                if name in getattr(import_module(other), "__all__", ()):
                    home = other
                    break
            if home:
                hint = f"it is in {home}"
            else:
                hint = f"public names are listed in {face}.__all__"
            raise AttributeError(f"module {face!r} has no attribute {name!r}; {hint}")
        with without_collections():
            value: object = getattr(import_module(module), name)
        setattr(sys.modules[face], name, value)
        return value

    def names() -> list[str]:
        """Return every public name, loaded or not."""
        return sorted([*sys.modules[face].__all__, *modules])

    return load, names


@contextmanager
def without_collections() -> Iterator[None]:
    """Context manager in which the garbage collector does not run by itself.

    Functions and classes of imported modules stay for good. The collector would look for garbage among them, and among the objects
    of torch, again and again: a third of the time that the import of the Accelerator takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
