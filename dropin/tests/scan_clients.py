"""Find the names of accelerate that other packages use, and those that the drop-in lacks; no torch is needed to find them.

python tests/scan_clients.py find trl peft …    # read their newest releases from the index; add them to golden/client_names.json
python tests/scan_clients.py write              # where the drop-in is installed: resolve the names; write the table in CLIENTS.md
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import json
import re
import sys
import tarfile
import urllib.request
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urljoin

TESTS_FOLDER = Path(__file__).parent
CLIENT_NAMES = TESTS_FOLDER / "golden" / "client_names.json"
PAGE = TESTS_FOLDER.parent / "CLIENTS.md"
INDEX: Final = "https://pypi.org/pypi/{}/json"
LARGEST_BYTES: Final = 120 * 2**20
PACKAGE: Final = "accelerate"
INSTANCE: Final = "Accelerator()"
_HOLDERS: Final = ("accelerator", "accelerator_", "_accelerator")
_DOTTED = re.compile(rf"{PACKAGE}(\.\w+)+")
_BEGIN, _END = "<!-- names: begin -->", "<!-- names: end -->"
# Any in this file: answers of the index, and whatever a name stands for.

_NOT_THERE: Final = "torch_xla, which the original imports where it is installed"
_OWN_NAME: Final = "made by the client's own patch"
REASONS: Final[dict[str, str]] = {
    "accelerate.Accelerator._te_fp8_patched": _OWN_NAME,
    "accelerate.Accelerator._unsloth_tp_hooks": _OWN_NAME,
    "accelerate.FullyShardedDataParallelPlugin.get_module_class_from_name": "not in the original 1.15.0 either",
    "accelerate.accelerator.ParallelismConfig.ep_enabled": _OWN_NAME,
    "accelerate.checkpointing.xm": _NOT_THERE,
    "accelerate.data_loader._AXOLOTL_EP_PATCHED": _OWN_NAME,
    "accelerate.optimizer.xm": _NOT_THERE,
    "accelerate.prepare_data_loader": "not in the original 1.15.0 either; the client asks first",
    "accelerate.state.DistributedType.TPU": "not in the original 1.15.0 either",
    "accelerate.state.xm": _NOT_THERE,
}
"""Names that do not resolve, and why."""


class NameFinder(ast.NodeVisitor):
    """Collector of the dotted names of one file that begin with the package's."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.patched: set[str] = set()
        self._aliases: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == PACKAGE:
                self.names.add(alias.name)
                self._aliases[alias.asname or PACKAGE] = (
                    alias.name if alias.asname else PACKAGE
                )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or module.split(".")[0] != PACKAGE:
            return
        for alias in node.names:
            if alias.name == "*":
                self.names.add(module)
                continue
            self.names.add(f"{module}.{alias.name}")
            self._aliases[alias.asname or alias.name] = f"{module}.{alias.name}"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (name := self._dotted(node)) is not None:
            self.names.add(name)
            if isinstance(node.ctx, ast.Store):
                self.patched.add(name)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        arguments = node.args
        if (
            called == "setattr"
            and len(arguments) > 1
            and isinstance(arguments[1], ast.Constant)
        ):
            owner = self._dotted(arguments[0])
            if owner is not None:
                self._patch(f"{owner}.{arguments[1].value!s}")
        if "patch" in called and arguments and isinstance(arguments[0], ast.Constant):
            text = arguments[0].value
            if isinstance(text, str) and _DOTTED.fullmatch(text):
                self._patch(text)
        self.generic_visit(node)

    def _patch(self, name: str) -> None:
        self.names.add(name)
        self.patched.add(name)

    def _dotted(self, node: ast.expr) -> str | None:
        """Return the name that a chain of attributes stands for; None for those of other objects."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            if node.attr in _HOLDERS and attributes:
                return ".".join([INSTANCE, *reversed(attributes)])
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        if node.id in self._aliases:
            return ".".join([self._aliases[node.id], *reversed(attributes)])
        if node.id in _HOLDERS and attributes:
            return ".".join([INSTANCE, *reversed(attributes)])
        return None


def names_in(source: str) -> tuple[set[str], set[str]]:
    """Return the names of the package that a file uses, and those among them that it replaces."""
    if PACKAGE not in source:
        return set(), set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in other packages' strings
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return set(), set()  # written for another Python
    finder = NameFinder()
    finder.visit(tree)
    return finder.names, finder.patched


def sources(archive: bytes, name: str) -> Iterator[str]:
    """Yield the Python files of a wheel or a source distribution."""
    if name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(io.BytesIO(archive)) as wheel:
            for member in wheel.namelist():
                if member.endswith(".py"):
                    yield wheel.read(member).decode(errors="replace")
        return
    with tarfile.open(fileobj=io.BytesIO(archive)) as distribution:
        for entry in distribution:
            file = (
                distribution.extractfile(entry) if entry.name.endswith(".py") else None
            )
            if file is not None:
                yield file.read().decode(errors="replace")


def read_newest(package: str) -> dict[str, Any] | None:
    """Return the version and the names of a package's newest release; None where the index has no fitting file."""
    with urllib.request.urlopen(INDEX.format(package), timeout=60) as answer:
        release = json.load(answer)
    files = [file for file in release["urls"] if file["size"] <= LARGEST_BYTES]
    files.sort(key=lambda file: (file["packagetype"] != "sdist", file["size"]))
    if not files:
        return None
    address = urljoin(INDEX.format(package), files[0]["url"])
    with urllib.request.urlopen(address, timeout=600) as answer:
        archive = answer.read()
    names: set[str] = set()
    patched: set[str] = set()
    for source in sources(archive, files[0]["filename"]):
        used, replaced = names_in(source)
        names |= used
        patched |= replaced
    return {
        "version": release["info"]["version"],
        "names": sorted(names),
        "patched": sorted(patched),
    }


def find(packages: list[str]) -> None:
    """Add the names of packages to the list."""
    for package in packages:
        try:
            release = read_newest(package)
        except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
            sys.stderr.write(f"{package}: {error}\n")
            continue
        if release is None:
            sys.stderr.write(f"{package}: no file of at most {LARGEST_BYTES} bytes\n")
            continue
        sys.stderr.write(
            f"{package} {release['version']}: {len(release['names'])} names\n"
        )
        clients = json.loads(CLIENT_NAMES.read_text()) if CLIENT_NAMES.exists() else {}
        clients[package] = release
        CLIENT_NAMES.write_text(
            json.dumps(dict(sorted(clients.items())), indent=1) + "\n"
        )


def resolves(name: str) -> bool:
    """Return whether the drop-in has a dotted name; attributes of functions and values are not looked at."""
    first, *attributes = name.split(".")
    owner: Any = importlib.import_module(PACKAGE)
    path = PACKAGE
    if first == INSTANCE:
        owner = owner.Accelerator
        attributes = attributes[:1]
    for attribute in attributes:
        path = f"{path}.{attribute}"
        if inspect.ismodule(owner):
            try:
                owner = getattr(owner, attribute)
            except AttributeError:
                try:
                    owner = importlib.import_module(path)
                except ImportError:
                    return False
        elif inspect.isclass(owner):
            return hasattr(owner, attribute) or attribute in dir(owner)
        else:
            return True
    return True


def table() -> str:
    """Return the table of packages that use names: how many resolve, and which do not. Raises: AssertionError without a reason."""
    lines = [
        "| Package | Version | Names | Resolve | Do not |",
        "|---|---|---|---|---|",
    ]
    for package, release in json.loads(CLIENT_NAMES.read_text()).items():
        names = [name for name in release["names"] if not name.startswith(INSTANCE)]
        missing = [name for name in names if not resolves(name)]
        assert all(name in REASONS for name in missing), f"{package}: {missing}"
        listed = "; ".join(
            f"`{name.removeprefix('accelerate.')}`: {REASONS[name]}" for name in missing
        )
        if names:
            cells = (
                package,
                release["version"],
                len(names),
                len(names) - len(missing),
                listed or "–",
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def write() -> None:
    """Put the table into the page."""
    preceding, _, following = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(
        f"{preceding}{_BEGIN}\n{table()}\n{_END}{following.partition(_END)[2]}"
    )


def main(words: list[str]) -> None:
    if words[0] == "find":
        find(words[1:])
    elif words[0] == "write":
        write()


if __name__ == "__main__":
    main(sys.argv[1:])
