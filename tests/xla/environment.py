"""Make an environment with torch_xla, in which `make test-xla` runs: python tests/xla/environment.py FOLDER [WHEELS].

torch_xla runs on one torch alone, older than hasten's own, and that torch is published for CUDA. Its libraries take gigabytes and
nothing here calls them, so each is replaced by an empty one that defines the symbols torch was linked against.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PINNED: Final = ("torch==2.9.0", "torch_xla==2.9.0")
PYTHONS: Final = ((3, 11), (3, 12), (3, 13))
OF_TORCH: Final = (
    "filelock",
    "typing-extensions",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
    "absl-py",
    "requests",
)
FOR_TESTS: Final = ("pytest", "transformers", "setuptools")
_CUDA: Final = re.compile(r"lib(cu|nccl|nv|cupti)")
_SYMBOL: Final = re.compile(r"(cu|nccl|nv)[A-Za-z_0-9]+")


def main() -> int:
    """Install everything into the folder; 3 where there is no wheel for this machine."""
    folder = Path(sys.argv[1]).absolute()
    wheels = sys.argv[2:]
    if (
        platform.system() != "Linux"
        or platform.machine() != "x86_64"
        or sys.version_info[:2] not in PYTHONS
    ):
        print(  # noqa: T201
            f"torch_xla 2.9 has wheels for Linux on x86_64 with Python 3.11 to 3.13, and this is {platform.system()} on "
            f"{platform.machine()} with Python {platform.python_version()}: the tests of strategy='xla' cannot run here."
        )
        return 3
    stamp = folder / ".ready"
    if stamp.exists() and stamp.stat().st_mtime > max(
        _changed(Path(__file__)), _changed(ROOT / "pyproject.toml")
    ):
        return 0
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.check_call([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    links = ["--find-links", wheels[0]] if wheels else []
    pinned = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned.write_text(
        "\n".join(
            line for line in lines if not line.startswith(("torch==", "setuptools=="))
        )
        + "\n"
    )
    without_torch = [*_dependencies(), *OF_TORCH, *FOR_TESTS]
    subprocess.check_call([*pip, "--constraint", str(pinned), *without_torch])
    subprocess.check_call([*pip, "--no-deps", *links, *PINNED])
    subprocess.check_call([*pip, "--no-deps", "--editable", str(ROOT)])
    _fill_in(
        Path(
            _output(
                str(python),
                "-c",
                "import sysconfig; print(sysconfig.get_paths()['purelib'])",
            ).strip()
        )
    )
    subprocess.check_call([str(python), "-c", "import torch, torch_xla"])
    stamp.touch()
    return 0


def _dependencies() -> list[str]:
    """What hasten needs besides torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [line for line in project["dependencies"] if not re.match(r"torch\b", line)]


def _fill_in(packages: Path) -> None:
    """Put an empty library beside torch's for each CUDA library that they name and that is not there."""
    folder = packages / "torch" / "lib"
    libraries = [
        *folder.glob("libtorch*.so"),
        *folder.glob("libc10*.so"),
        *folder.glob("libshm*.so"),
    ]
    libraries += packages.glob("_XLAC*.so")
    existing_names = {path.name for path in folder.iterdir()}
    missing_names = {
        name
        for path in libraries
        for name in _needed(path)
        if _CUDA.match(name) and name not in existing_names
    }
    symbols = _undefined(libraries)
    loose = symbols.pop("", set())
    for name in sorted(missing_names):
        # libraries mark their symbols with a version that is their own name; NVSHMEM with its short one
        version = "NVSHMEM" if "nvshmem" in name else name
        marked = symbols.pop(version, set())
        _compile(folder / name, marked, version, loose - marked)
        loose = set()


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*?)\]", _output("readelf", "-dW", str(library)))


def _undefined(libraries: Iterable[Path]) -> dict[str, set[str]]:
    """The symbols that the libraries take from others, by version; of those without one, CUDA's alone."""
    symbols_by_version: defaultdict[str, set[str]] = defaultdict(set)
    defined_symbols: set[str] = set()
    for library in libraries:
        for line in _output("readelf", "-W", "--dyn-syms", str(library)).splitlines():
            fields = line.split()
            if len(fields) < 8:
                continue
            name, _, version = fields[7].partition("@")
            if fields[6] != "UND":
                defined_symbols.add(name)
            elif fields[4] != "WEAK" and (
                version.strip("@") or _SYMBOL.fullmatch(name)
            ):
                symbols_by_version[version.strip("@")].add(name)
    symbols_by_version[""] -= defined_symbols
    return symbols_by_version


def _compile(target: Path, marked: set[str], version: str, loose: set[str]) -> None:
    """One library whose functions return an error number."""
    with tempfile.TemporaryDirectory() as build_folder:
        code, versions = (
            Path(build_folder, "empty.c"),
            Path(build_folder, "versions.map"),
        )
        code.write_text(
            "".join(
                f"int {name}(void) {{ return 100; }}\n"
                for name in sorted(marked | loose)
            )
            or "\n"
        )
        command = [
            "gcc",
            "-w",
            "-shared",
            "-fPIC",
            "-o",
            str(target),
            f"-Wl,-soname,{target.name}",
            str(code),
        ]
        if marked:
            versions.write_text(
                f"{version} {{ global: {' '.join(f'{name};' for name in sorted(marked))} }};\n"
            )
            command.append(f"-Wl,--version-script={versions}")
        subprocess.check_call(command)


def _changed(path: Path) -> float:
    return path.stat().st_mtime


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
