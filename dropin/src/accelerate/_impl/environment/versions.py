"""Versions of packages: comparing them, and installing the one that belongs to another."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from packaging.version import Version, parse

from accelerate._impl.environment.constants import STR_OPERATION_TO_FUNC

torch_version = parse(metadata.version("torch"))


def compare_versions(
    library_or_version: str | Version, operation: str, requirement_version: str
) -> bool:
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(
            f"`operation` must be one of {list(STR_OPERATION_TO_FUNC)}, received {operation}"
        )
    if isinstance(library_or_version, str):
        library_or_version = parse(metadata.version(library_or_version))
    return bool(
        STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version))
    )


def is_torch_version(operation: str, version: str) -> bool:
    return compare_versions(torch_version, operation, version)


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla of this torch, or with `upgrade` the latest of both. Raises: RuntimeError outside of Google Colab."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if "google.colab" not in str(shell):
        raise RuntimeError("`install_xla` utility works only on google colab.")
    release = ".".join(map(str, torch_version.release[:2]))
    if upgrade:
        requirements = ["-U", "torch", "torch_xla[tpu]"]
    else:
        requirements = [f"torch_xla[tpu]~={release}.0"]
    subprocess.run([sys.executable, "-m", "pip", "install", *requirements], check=True)
