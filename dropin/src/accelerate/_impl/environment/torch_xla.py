"""Installing PyTorch/XLA in a notebook."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that belongs to the torch here, or with `upgrade` the latest of both; in Google Colab only.

    Raises: RuntimeError elsewhere, where the environment is not ours to change.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if "google.colab" not in str(shell):
        raise RuntimeError("`install_xla` utility works only on google colab.")
    release = ".".join(version("torch").split("+")[0].split(".")[:2])
    wanted = ["-U", "torch", "torch_xla[tpu]"] if upgrade else [f"torch_xla[tpu]~={release}.0"]
    subprocess.run([sys.executable, "-m", "pip", "install", *wanted], check=True)
