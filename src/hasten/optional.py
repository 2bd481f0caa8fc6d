"""Imports of optional packages: checked for presence and version, with an error that names what to install."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from hasten.errors import MissingPackageError

_EXTRAS = (  # import name -> extra of hasten that installs it
    ("huggingface_hub", "hub"),
    ("deepspeed", "deepspeed"),
    ("megatron", "megatron"),
    ("torchao", "fp8"),
    ("fsspec", "remote"),
    ("ray", "ray"),
    ("torchdata", "data"),
    ("prometheus_client", "metrics"),
    ("torchft", "survive"),
)

# import name -> name to install, where they differ
_DISTRIBUTIONS = (("megatron", "megatron-core"),)


def installed_version(module: str) -> str | None:
    """Return the installed version of the distribution that provides `module`, or None when it is absent."""
    if importlib.util.find_spec(module) is None:
        return None
    for name in _distributions(module):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "0"


def _distributions(module: str) -> Iterator[str]:
    """Yield candidate names of the distribution; the last source is slow, as it reads the metadata of all installed packages."""
    yield dict(_DISTRIBUTIONS).get(module, module)
    yield module.replace("_", "-")
    yield from metadata.packages_distributions().get(module, ())


def available(module: str, spec: str = "") -> bool:
    """Return whether `module` can be imported and satisfies `spec` (for example ">=0.16")."""
    try:
        found = importlib.util.find_spec(module) is not None
    # a dotted name without its parent, or a stub without a spec
    except (ModuleNotFoundError, ValueError):
        return False
    if not found or not spec:
        return found
    version = installed_version(module.partition(".")[0])
    # imported only when a version is requested
    specifiers = importlib.import_module("packaging.specifiers")
    return version is not None and bool(
        specifiers.SpecifierSet(spec).contains(version, prereleases=True)
    )


# Any: the module is foreign and untyped here
def need(module: str, spec: str = "", why: str = "") -> Any:
    """Import and return the module.

    Raises: MissingPackageError with the installed version, the required one and the install command, or the reason the import failed.
    """
    check_installed(module, spec, why)
    try:
        return importlib.import_module(module)
    # a broken foreign package may raise any error: named and raised again
    except Exception as error:
        root = module.partition(".")[0]
        purpose = f" for {why}" if why else ""
        named = dict(_DISTRIBUTIONS).get(root, root)
        raise MissingPackageError(
            f"the package {root!r} {installed_version(root)} is installed, but importing {module} failed ({type(error).__name__}: {error}); it is "
            f"needed{purpose}. Reinstall it: pip uninstall {named}, then pip install {named}"
        ) from error


def check_installed(module: str, spec: str = "", why: str = "") -> None:
    """Raise unless the package of `module` is installed in a version that `spec` allows; nothing is imported.

    Raises: MissingPackageError with the installed version, the required one and the install command.
    """
    root = module.partition(".")[0]
    purpose = f" for {why}" if why else ""
    extra = dict(_EXTRAS).get(root)
    named = dict(_DISTRIBUTIONS).get(root, root)
    if extra:
        remedy = f"pip install 'hasten[{extra}]'"
    else:
        remedy = f"pip install '{named}{spec}'"
    if not available(root):
        raise MissingPackageError(
            f"the package {root!r} is not installed; it is needed{purpose}. Run: {remedy}"
        )
    if spec and not available(root, spec):
        version = installed_version(root)
        raise MissingPackageError(
            f"{named} {version} is installed, but {named}{spec} is needed{purpose}. Run: pip install '{named}{spec}'"
        )
