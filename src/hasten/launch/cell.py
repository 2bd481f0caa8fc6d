"""The program of a process started from a notebook: loads the function, calls it, and keeps the first rank's result.

Run under `hasten launch -m hasten.launch.cell FOLDER`, where FOLDER is the notebook's private folder.
"""

from __future__ import annotations

import linecache
import pickle
import sys
from pathlib import Path
from typing import Final

import cloudpickle

from hasten.errors import LaunchError
from hasten.runtime import env as environment
from hasten.runtime.topology import Topology

CALL: Final = "call.pkl"
RESULT: Final = "result.pkl"


def run(folder: Path) -> None:
    """Call the notebook's function; the first rank leaves what it returned."""
    # Written by the notebook's own process into a folder that only its user can open.
    function, args, sources = pickle.loads((folder / CALL).read_bytes())
    linecache.cache.update({name: (len(lines), None, lines, name) for name, lines in sources.items()})
    result = function(*args)
    if Topology.from_env(environment.snapshot()).is_main:
        _keep(result, folder / RESULT)


def _keep(result: object, path: Path) -> None:
    try:
        data = cloudpickle.dumps(result)
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise LaunchError(
            f"the function returned a {type(result).__qualname__}, which cannot be sent back to the notebook ({error}). "
            f"Return plain data or tensors, or save it to a file."
        ) from error
    draft = path.with_suffix(".draft")
    draft.write_bytes(data)
    draft.replace(path)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
