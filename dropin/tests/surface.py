"""Compare the public names of Accelerate 1.15 with the drop-in's, and write SURFACE.md.

python tests/surface.py names OUT.json      # in an environment with the original package: list its names
python tests/surface.py homes OUT.json      # there, too: every name of every module (`dir()`), with the module that defines it
python tests/surface.py elsewhere           # in an environment with the drop-in: list the names its faces take from elsewhere
python tests/surface.py write               # in an environment with the drop-in: compare and write SURFACE.md
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import sys
import types
import warnings
from pathlib import Path
from typing import Any

TESTS_FOLDER = Path(__file__).parent
NAMES = TESTS_FOLDER / "golden" / "names.json"
EVERY_NAME = TESTS_FOLDER / "golden" / "every_name.json"
ELSEWHERE = (
    TESTS_FOLDER.parent / "src" / "accelerate" / "_impl" / "surface" / "elsewhere.txt"
)
LEFT_OUT = {
    "accelerate.commands.menu": "drawing menus: the wizard is hasten's",
    "accelerate.commands.config.cluster": "inner steps of the wizard, which is hasten's",
    "accelerate.commands.config.sagemaker": "SageMaker jobs are started with SageMaker's own tools",
    "accelerate.commands.config.config_utils": "inner steps of the wizard, which is hasten's",
    "accelerate.test_utils.scripts.external_deps.test_metrics": "checks with data and metrics of the Hub; the others are here",
    "accelerate.test_utils.scripts.external_deps": "trainings with models and data of the Hub, which only the original's own CI runs",
    "accelerate.test_utils.scripts.test_notebook": "pytest's marks, and the command line of a script",
    "accelerate.test_utils.scripts.test_merge_weights": "the command line of a script",
    "accelerate.utils.rich": "importing it patches tracebacks; it is there, but has no names",
}
_WIZARD = "inner steps of the wizard, which is hasten's"
_FSDP2 = "inner steps of `accelerate to-fsdp2`, written anew"
_INNER = "an inner step of the original that is no step here"
_HELP = "how the original draws its help"
LEFT_NAMES = {
    **dict.fromkeys(
        (
            "get_user_input",
            "get_cluster_input",
            "get_sagemaker_input",
            "cluster",
            "config_utils",
        ),
        _WIZARD,
    ),
    **dict.fromkeys(
        (
            "_ask_field",
            "_ask_options",
            "_convert_compute_environment",
            "menu",
            "sagemaker",
        ),
        _WIZARD,
    ),
    **dict.fromkeys(
        (
            "CustomHelpFormatter",
            "SubcommandHelpFormatter",
            "clean_option",
            "options_to_group",
        ),
        _HELP,
    ),
    **dict.fromkeys(
        (
            "description",
            "_description",
            "_StoreAction",
            "_StoreConstAction",
            "_StoreTrueAction",
        ),
        _HELP,
    ),
    "ConversionStatus": _FSDP2,
    **dict.fromkeys(("ARGUMENT_KEY_MAPPING", "ARGUMENT_VALUE_MAPPING"), _FSDP2),
    "mocked_dataloaders_for_autoregressive_models": "needs the original's own test data",
    "logger": "a module's own logger; `accelerate.logging.get_logger(module)` gives it",
    "annotations": "a feature of `__future__`",
    **dict.fromkeys(
        (
            "_dispatch_batches",
            "_even_batches",
            "_split_batches",
            "_use_seedable_sampler",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "_attach_context_parallel_hooks",
            "_refuse_recurrent_layers_under_sequence_parallelism",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "_attach_layerwise_casting_hooks",
            "_accelerate_added_attributes",
            "_compiler_disable",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "_atleast_one_tracker_available",
            "_read_stream",
            "_stream_subprocess",
            "_available_trackers",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "_PYTORCH_DATALOADER_ADDITIONAL_KWARGS",
            "_PYTORCH_DATALOADER_KWARGS",
            "v",
            "i",
            "_",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "additional_kwargs",
            "version",
            "SharedDict",
            "_replace_with_bnb_layers",
            "_tqdm",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "AmaxComputeAlgorithm",
            "Backend",
            "FP8Format",
            "OptLevel",
            "ProfilerActivity",
        ),
        "a type alias",
    ),
    **dict.fromkeys(
        ("MODEL_CONFIGS_TO_MEGATRON_PARSERS", "_handle_megatron_data_iterator"), _INNER
    ),
    **dict.fromkeys(
        ("_nvidia_smi", "_parse_cpu_list", "_find_final_norm", "_prepare_sd_options"),
        _INNER,
    ),
    **dict.fromkeys(
        ("_distributed_checkpoint_to_merged_weights", "_get_model_state_dict"), _INNER
    ),
    **dict.fromkeys(
        (
            "_set_model_state_dict",
            "_torch_distributed_available",
            "_torch_xla_available",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "_tpu_available",
            "_get_param_device",
            "_get_proper_dtype",
            "_init_infer_auto_device_map",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "_gpu_broadcast",
            "_gpu_gather",
            "_gpu_gather_object",
            "_tpu_broadcast",
            "_tpu_gather",
        ),
        _INNER,
    ),
    **dict.fromkeys(("_neuron_broadcast_object_list", "_neuron_gather_object"), _INNER),
    **dict.fromkeys(
        ("safe_load_file", "safe_save_file"),
        "functions of `safetensors.torch` under another name",
    ),
    **dict.fromkeys(
        (
            "setup",
            "_test_stateful_dataloader_resume",
            "MockModel",
            "_run_and_get_grads",
            "_mp_fn",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "_test_stateful_dataloader_save_state_resume",
            "test_join_raises_warning_for_non_ddp_distributed",
        ),
        _INNER,
    ),
    "DYNAMO_BACKENDS": "written out: the members of `DynamoBackend`",
}
CONSTANTS = (
    "accelerate.utils.constants",
    "accelerate.commands.config.config_args",
    "accelerate.utils.imports",
)
OTHER_HOMES = {  # classes that name another module than the one they are imported from
    **dict.fromkeys(("MethodType",), "types"),
    **dict.fromkeys(("safe_open",), "safetensors"),
}


def public(module: types.ModuleType) -> dict[str, str]:
    """Names a module defines; a package's include those it re-exports from its own modules."""
    package = hasattr(module, "__path__")
    kinds_by_name = {}
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("_") or isinstance(value, types.ModuleType):
            continue
        home = getattr(value, "__module__", None)
        is_own = isinstance(home, str) and (
            home.startswith("accelerate") if package else home == module.__name__
        )
        plain = (
            not callable(value)
            and name.isupper()
            and (package or module.__name__.endswith("constants"))
        )
        if is_own or plain:
            kinds_by_name[name] = (
                "class"
                if isinstance(value, type)
                else "function"
                if callable(value)
                else "value"
            )
    return kinds_by_name


def names() -> dict[str, dict[str, str]]:
    """Every public name of the installed package by module."""
    import accelerate

    names_by_module = {"accelerate": public(accelerate)}
    for module_info in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if module_info.name.startswith("accelerate.test_utils.scripts"):
            continue
        try:
            module = importlib.import_module(module_info.name)
        except ImportError:
            continue
        names_by_module[module_info.name] = public(module)
    return names_by_module


def modules() -> dict[str, types.ModuleType]:
    """Every module of the installed package that can be imported here."""
    import accelerate

    loaded_modules = {"accelerate": accelerate}
    for module_info in pkgutil.walk_packages(
        accelerate.__path__, "accelerate.", onerror=lambda name: None
    ):
        if "._impl" in module_info.name or module_info.name.endswith("__main__"):
            continue
        # a script of the original runs as it is imported
        with contextlib.suppress(ImportError, ValueError):
            loaded_modules[module_info.name] = importlib.import_module(module_info.name)
    return loaded_modules


def home_of(
    value: Any, name: str, module: str, constants: dict[str, tuple[str, Any]]
) -> str:
    """The module that a name comes from; `-NAME` for a module; the asking module where no other one is known."""
    if isinstance(value, types.ModuleType):
        return f"-{value.__name__}"
    if name in ("Optional", "Union", "TYPE_CHECKING"):
        return "typing"
    if name in OTHER_HOMES:
        return OTHER_HOMES[name]
    if callable(value):
        home = getattr(value, "__module__", None)
        with contextlib.suppress(ImportError, AttributeError, TypeError):
            return (
                str(home)
                if getattr(importlib.import_module(str(home)), name) is value
                else module
            )
        return module
    home, constant = constants.get(name, (module, None))
    return home if constant is value else module


def homes() -> dict[str, dict[str, str]]:
    """Every name of every module, private ones too, with the module that it comes from."""
    loaded = modules()
    constants: dict[str, tuple[str, Any]] = {}
    for module in CONSTANTS:
        for name, value in vars(loaded[module]).items():
            if not callable(value) and not isinstance(value, types.ModuleType):
                constants.setdefault(name, (module, value))
    return {
        module: {
            name: home_of(getattr(loaded_module, name), name, module, constants)
            for name in dir(loaded_module)
            if not name.startswith("__")
        }
        for module, loaded_module in loaded.items()
    }


def elsewhere() -> str:
    """The table of names that faces take from another module: those that they do not have by themselves."""
    ELSEWHERE.write_text("")  # so that faces show only what they have by themselves
    from accelerate._impl.surface.homes import HOMES

    lines = []
    for face, names in json.loads(EVERY_NAME.read_text()).items():
        try:
            own_names, names_by_home = (
                set(dir(importlib.import_module(face))),
                dict[str, list[str]](),
            )
        except ImportError:
            continue
        if ".scripts." in face:
            continue
        rooms = [room for room, shown in HOMES.items() if shown == face]
        for name, home in names.items():
            if home == face:  # a private name that a room of the face has
                home = next(
                    (
                        room
                        for room in rooms
                        if hasattr(importlib.import_module(room), name)
                    ),
                    face,
                )
            if (
                name in own_names
                or home == face
                or home.startswith("accelerate.test_utils.scripts.")
            ):
                continue
            if ".commands." in home and reason(home.removeprefix("-")):
                continue
            word, home = (
                (f"{name}={home[1:]}", "-") if home.startswith("-") else (name, home)
            )
            names_by_home.setdefault(home, []).append(word)
        lines += [
            f"{face} {home} {' '.join(sorted(words))}"
            for home, words in sorted(names_by_home.items())
        ]
    return "\n".join(lines) + "\n"


def unresolved() -> dict[str, str]:
    """Names of the original that resolve to nothing here, each with the reason, or an empty one."""
    reasons = {}
    for module, names in json.loads(EVERY_NAME.read_text()).items():
        for name in names:
            if "test_utils.scripts." in module and names[name] != module:
                continue  # what a script imports for its own use
            try:
                getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                reasons[f"{module}.{name}"] = reason(module) or LEFT_NAMES.get(name, "")
    return reasons


def reason(module: str) -> str | None:
    """Why a module is left out, if it is."""
    return next(
        (
            why
            for name, why in LEFT_OUT.items()
            if module == name or module.startswith(f"{name}.")
        ),
        None,
    )


def state_of(module: str, name: str) -> str:
    """What becomes of a name: it works, or is left out with a reason."""
    from accelerate._impl.surface.left_out import MARK

    why = reason(module) or LEFT_NAMES.get(name)
    try:
        value: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return f"left out: {why}" if why else "missing"
    left_out_reason = getattr(value, "__dict__", {}).get(MARK)
    return f"left out: {left_out_reason}" if left_out_reason else "works"


def table() -> dict[str, dict[str, str]]:
    """The state of every name of the original."""
    original_names = json.loads(NAMES.read_text())
    return {
        module: {name: state_of(module, name) for name in sorted(module_names)}
        for module, module_names in sorted(original_names.items())
    }


def render(states: dict[str, dict[str, str]]) -> str:
    """SURFACE.md."""
    flat = [
        state for module_states in states.values() for state in module_states.values()
    ]
    count = {
        kind: sum(state.startswith(kind) for state in flat)
        for kind in ("works", "left out", "missing")
    }
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
    for module, module_states in states.items():
        if not module_states:
            continue
        lines += ["", f"## {module}", ""]
        groups: dict[str, list[str]] = {}
        for name, state in module_states.items():
            groups.setdefault(state, []).append(f"`{name}`")
        for state, members in sorted(
            groups.items(), key=lambda item: (item[0] != "works", item[0])
        ):
            lines.append(f"- **{state}**: {', '.join(members)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] in ("names", "homes"):
        listed: dict[str, dict[str, str]] = {"names": names, "homes": homes}[
            sys.argv[1]
        ]()
        Path(sys.argv[2]).write_text(
            json.dumps(listed, indent=0, sort_keys=True) + "\n"
        )
    elif sys.argv[1] == "elsewhere":
        ELSEWHERE.write_text(elsewhere())
    else:
        (TESTS_FOLDER.parent / "SURFACE.md").write_text(render(table()))
