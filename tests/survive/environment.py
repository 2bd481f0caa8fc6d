"""Make an environment with torchft, in which `make test-survive` runs: python tests/survive/environment.py FOLDER [WHEELS].

torchft asks for a torch of its own choice; hasten's torch works with it, so it is installed without its dependencies.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TORCHFT: Final = "torchft==0.2.0"
OF_TORCHFT: Final = (
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-http",
)
FOR_TESTS: Final = ("pytest", "pytest-timeout")
PYTHONS: Final = ((3, 11), (3, 12))


def main() -> int:
    """Install everything into the folder; 3 where there is no wheel for this machine."""
    folder = Path(sys.argv[1]).absolute()
    links = ["--find-links", sys.argv[2]] if sys.argv[2:] else []
    if (
        platform.system() != "Linux"
        or platform.machine() != "x86_64"
        or sys.version_info[:2] not in PYTHONS
    ):
        print(  # noqa: T201
            f"torchft 0.2 has wheels for Linux on x86_64 with Python 3.11 and 3.12, and this is {platform.system()} on {platform.machine()} with "
            f"Python {platform.python_version()}: the tests of survive cannot run here."
        )
        return 3
    stamp = folder / ".ready"
    sources = (Path(__file__), ROOT / "pyproject.toml", ROOT / "constraints.txt")
    if stamp.exists() and stamp.stat().st_mtime > max(
        path.stat().st_mtime for path in sources
    ):
        return 0
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.check_call([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", *links]
    constraint = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.check_call([*pip, *constraint, "--editable", str(ROOT), *FOR_TESTS])
    subprocess.check_call([*pip, *OF_TORCHFT])
    subprocess.check_call([*pip, "--no-deps", TORCHFT])
    subprocess.check_call([str(python), "-c", "import torchft.coordination"])
    stamp.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
