"""Giving classes the module they have always been known under, wherever the file is that defines them."""

from __future__ import annotations

from typing import get_type_hints


def settle_in(module: str, *classes: type) -> None:
    """Make `module` the home of classes: messages name it, and objects pickled here are found there by the original.

    Annotations are resolved first, while the names they use can still be found.
    """
    for one in classes:
        if written := vars(one).get("__annotations__"):
            found = get_type_hints(one)
            one.__annotations__ = {name: found[name] for name in written}
        one.__module__ = module
