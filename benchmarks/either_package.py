"""One machine, both packages named `accelerate`: environments in which a script finds the original, or the drop-in.

The drop-in refuses to be imported where another distribution of that name is installed, and it is right: their modules
would be mixed. So neither is installed in the environments made here. An environment is a folder of links to everything
in this interpreter's site-packages but `accelerate`, and a link to the package that is wanted, with its metadata, which
libraries ask for the version. `python -S` leaves the real site-packages out, PYTHONPATH names the folder instead.

    folder = environment("drop-in", tmp / "drop-in")
    subprocess.run(*command(folder, "script.py", "--option"))
"""

from __future__ import annotations

import os
import sys
import tomllib
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("original", "drop-in")


def environment(package: str, folder: Path, original: Path | None = None) -> Path:
    """An environment with that package, below `folder`; `original` is where to find it when it is not installed."""
    # by this name libraries that pickle know what is not the user's own code
    folder = folder / "site-packages"
    folder.mkdir(parents=True)
    for place in map(Path, sys.path):
        if place.name in ("site-packages", "dist-packages") and place.is_dir():
            for one in place.iterdir():
                link = folder / one.name
                if (
                    not one.name.lower().startswith("accelerate")
                    and not link.is_symlink()
                ):
                    link.symlink_to(one)
    if package == "original":
        _link_original(folder, original)
    else:
        _link_dropin(folder)
    return folder


def command(
    folder: Path, script: str | Path, *options: str
) -> tuple[list[str], dict[str, str]]:
    """What to start, and its variables: `subprocess.Popen(words, env=variables)`."""
    given = [
        one
        for one in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if one and not _holds_either(Path(one))
    ]
    path = os.pathsep.join([*given, str(ROOT / "src"), str(folder)])
    return [sys.executable, "-S", str(script), *options], {
        **os.environ,
        "PYTHONPATH": path,
    }


def _holds_either(place: Path) -> bool:
    return (place / "accelerate").is_dir()


def _link_original(folder: Path, given: Path | None) -> None:
    where = [] if given is None else [str(given)]
    found = [
        one
        for one in metadata.distributions(name="accelerate", path=where or sys.path)
        if "+" not in one.version
    ]
    if not found:
        sys.exit(
            "the original accelerate is not installed here; unpack it into a folder and name that by --original"
        )
    place = Path(str(found[0].locate_file(""))).resolve()
    (folder / "accelerate").symlink_to(place / "accelerate")
    for one in place.glob("accelerate-*.dist-info"):
        if "+" not in one.name:
            (folder / one.name).symlink_to(one)


def _link_dropin(folder: Path) -> None:
    (folder / "accelerate").symlink_to(ROOT / "dropin" / "src" / "accelerate")
    project = tomllib.loads((ROOT / "dropin" / "pyproject.toml").read_text())["project"]
    info = folder / f"accelerate-{project['version']}.dist-info"
    info.mkdir()
    page = ConfigParser()
    # clients ask for the address of the home page
    page.read(ROOT / "dropin" / "setup.cfg")
    words = {
        "Metadata-Version": "2.1",
        "Name": project["name"],
        "Version": project["version"],
    }
    words["Home-page"] = page["metadata"]["url"]
    (info / "METADATA").write_text(
        "".join(f"{key}: {value}\n" for key, value in words.items())
    )
