"""Refusing to run beside the package this one stands in for."""

from __future__ import annotations

from importlib import metadata


def refuse_other_package() -> None:
    """Raise when another distribution named `accelerate` shares this one's folder: modules of both would be mixed."""
    for one in metadata.distributions(name="accelerate"):
        if not one.version.endswith("+hasten"):
            raise ImportError(
                f"accelerate {one.version} is installed in {one.locate_file('')} beside hasten's stand-in for it; both bring a package named `accelerate`, and their modules would be mixed. Run `pip uninstall accelerate` until it says that it is not installed, then install the one you want."
            )
