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


def build_environment(package: str, folder: Path, original: Path | None = None) -> Path:
    """An environment with that package, below `folder`; `original` is where to find it when it is not installed."""
    # by this name libraries that pickle know what is not the user's own code
    folder = folder / "site-packages"
    folder.mkdir(parents=True)
    for search_folder in map(Path, sys.path):
        if (
            search_folder.name in ("site-packages", "dist-packages")
            and search_folder.is_dir()
        ):
            for package_path in search_folder.iterdir():
                link = folder / package_path.name
                if (
                    not package_path.name.lower().startswith("accelerate")
                    and not link.is_symlink()
                ):
                    link.symlink_to(package_path)
    if package == "original":
        _link_original(folder, original)
    else:
        _link_dropin(folder)
    return folder


def contender_command(
    folder: Path, script: str | Path, *options: str
) -> tuple[list[str], dict[str, str]]:
    """What to start, and its variables: `subprocess.Popen(words, env=variables)`."""
    search_folders = [
        search_folder
        for search_folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if search_folder and not _holds_either(Path(search_folder))
    ]
    path = os.pathsep.join([*search_folders, str(ROOT / "src"), str(folder)])
    return [sys.executable, "-S", str(script), *options], {
        **os.environ,
        "PYTHONPATH": path,
    }


def _holds_either(folder: Path) -> bool:
    return (folder / "accelerate").is_dir()


def _link_original(folder: Path, original: Path | None) -> None:
    where = [] if original is None else [str(original)]
    distributions = [
        candidate
        for candidate in metadata.distributions(
            name="accelerate", path=where or sys.path
        )
        if "+" not in candidate.version
    ]
    if not distributions:
        sys.exit(
            "the original accelerate is not installed here; unpack it into a folder and name that by --original"
        )
    install_folder = Path(str(distributions[0].locate_file(""))).resolve()
    (folder / "accelerate").symlink_to(install_folder / "accelerate")
    for candidate in install_folder.glob("accelerate-*.dist-info"):
        if "+" not in candidate.name:
            (folder / candidate.name).symlink_to(candidate)


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
