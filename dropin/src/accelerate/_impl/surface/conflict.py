"""Refusing to run beside the package this one stands in for."""

from __future__ import annotations

from importlib import metadata


def refuse_other_package() -> None:
    """Raise when another distribution named `accelerate` is installed in the same environment.

    Two of them share one folder, so modules of both would be mixed.
    """
    found = {}
    for one in metadata.distributions(name="accelerate"):
        found[one.version] = str(one.locate_file(""))
    others = {version: place for version, place in found.items() if not version.endswith("+hasten")}
    if others:
        version, place = next(iter(others.items()))
        raise ImportError(
            f"accelerate {version} is installed in {place} beside hasten's stand-in for it; both bring a package named "
            "`accelerate`, and their modules would be mixed. Run `pip uninstall accelerate` until it says that it is "
            "not installed, then install the one you want."
        )
