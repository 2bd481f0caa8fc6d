"""Compare the public names of Accelerate 1.15 with the drop-in's, and write SURFACE.md.

python tests/surface.py names OUT.json      # in an environment with the original package: list its names
python tests/surface.py write               # in an environment with the drop-in: compare and write SURFACE.md
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import types
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = HERE / "golden" / "names.json"
LEFT_OUT = {
    "accelerate.commands.estimate": "inner steps of `accelerate estimate-memory`, which hasten answers",
    "accelerate.commands.menu": "drawing menus: the wizard is hasten's",
    "accelerate.commands.config.cluster": "inner steps of the wizard, which is hasten's",
    "accelerate.commands.config.sagemaker": "SageMaker jobs are started with SageMaker's own tools",
    "accelerate.commands.config.config_utils": "inner steps of the wizard, which is hasten's",
    "accelerate.test_utils.scripts": "the original's own test scripts; `accelerate test` runs hasten's self-check",
    "accelerate.test_utils.examples": "checks of the original's own example folder",
    "accelerate.utils.rich": "importing it patches tracebacks; it is there, but has no names",
}
LEFT_NAMES = {
    "get_user_input": "inner steps of the wizard, which is hasten's",
    "CustomHelpFormatter": "how the original draws its help",
    "clean_option": "how the original draws its help",
    "ConversionStatus": "inner steps of `accelerate to-fsdp2`, written anew",
    "convert_config_to_fsdp2": "inner steps of `accelerate to-fsdp2`, written anew",
    "load_config": "inner steps of `accelerate to-fsdp2`, written anew",
    "mocked_dataloaders": "needs the original's own test data",
    "mocked_dataloaders_for_autoregressive_models": "needs the original's own test data",
}


def public(module: types.ModuleType) -> dict[str, str]:
    """Names a module defines; a package's include those it re-exports from its own modules."""
    package = hasattr(module, "__path__")
    found = {}
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("_") or isinstance(value, types.ModuleType):
            continue
        home = getattr(value, "__module__", None)
        own = isinstance(home, str) and (home.startswith("accelerate") if package else home == module.__name__)
        plain = not callable(value) and name.isupper() and (package or module.__name__.endswith("constants"))
        if own or plain:
            found[name] = "class" if isinstance(value, type) else "function" if callable(value) else "value"
    return found


def names() -> dict[str, dict[str, str]]:
    """Every public name of the installed package by module."""
    import accelerate

    found = {"accelerate": public(accelerate)}
    for one in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if one.name.startswith("accelerate.test_utils.scripts"):
            continue
        try:
            module = importlib.import_module(one.name)
        except ImportError:
            continue
        found[one.name] = public(module)
    return found


def reason(module: str) -> str | None:
    """Why a module is left out, if it is."""
    return next((why for name, why in LEFT_OUT.items() if module == name or module.startswith(f"{name}.")), None)


def state_of(module: str, name: str) -> str:
    """What becomes of a name: it works, or is left out with a reason."""
    from accelerate._impl.surface.left_out import MARK

    why = reason(module) or LEFT_NAMES.get(name)
    try:
        value: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return f"left out: {why}" if why else "missing"
    part = getattr(value, "__dict__", {}).get(MARK)
    return f"left out: {part}" if part else "works"


def table() -> dict[str, dict[str, str]]:
    """The state of every name of the original."""
    wanted = json.loads(NAMES.read_text())
    return {
        module: {name: state_of(module, name) for name in sorted(found)} for module, found in sorted(wanted.items())
    }


def render(states: dict[str, dict[str, str]]) -> str:
    """SURFACE.md."""
    flat = [state for found in states.values() for state in found.values()]
    count = {kind: sum(state.startswith(kind) for state in flat) for kind in ("works", "left out", "missing")}
    lines = [
        "# Surface",
        "",
        "Every public name that the modules of Accelerate 1.15.0 define and its packages re-export, as `tests/surface.py`",
        "finds it, and what it does here. What a module merely imports for its own use is not listed.",
        "A name that is left out and still resolves raises a NotImplementedError with that reason when it is used.",
        "",
        f"{len(flat)} names: {count['works']} work, {count['left out']} left out on purpose, "
        f"{count['missing']} missing.",
    ]
    for module, found in states.items():
        if not found:
            continue
        lines += ["", f"## {module}", ""]
        groups: dict[str, list[str]] = {}
        for name, state in found.items():
            groups.setdefault(state, []).append(f"`{name}`")
        for state, members in sorted(groups.items(), key=lambda item: (item[0] != "works", item[0])):
            lines.append(f"- **{state}**: {', '.join(members)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "names":
        Path(sys.argv[2]).write_text(json.dumps(names(), indent=0, sort_keys=True) + "\n")
    else:
        (HERE.parent / "SURFACE.md").write_text(render(table()))
