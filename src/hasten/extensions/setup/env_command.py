"""`hasten env`: a report of machine, packages and settings for an issue, without secrets."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hasten.config import files
from hasten.config.files import effective_settings
from hasten.config.masking import masked_tree, masked_value
from hasten.errors import HastenError
from hasten.extensions.setup.machine import examine_machine
from hasten.launch.checkin import package_versions
from hasten.launch.shape import read_allocation
from hasten.optional import need
from hasten.runtime import env as environment
from hasten.version import __version__

_VARIABLES: Final = re.compile(
    r"(HASTEN|ACCELERATE|NCCL|GLOO|TORCH|CUDA|HIP|ROCR|OMP|MKL|PJRT|XLA|SLURM|OMPI|PMI|PET)_|"
    r"(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|VIRTUAL_ENV|CONDA_PREFIX)$"
)


def main(argv: Sequence[str]) -> int:
    """Run `hasten env …`."""
    parser = argparse.ArgumentParser(
        prog="hasten env",
        description="Print a report of machine, packages and settings for an issue.",
    )
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        help="the settings file to report",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    environment_variables = environment.snapshot()
    report: dict[str, Any] = {  # Any: strings, and mappings of them
        "hasten": __version__,
        "platform": platform.platform(),
        "machine": examine_machine().words,
        "cluster": _cluster_text(environment_variables),
        "packages": package_versions(),
        "torch": _torch_facts(),
        "variables": _training_variables(environment_variables),
        "settings": _settings_report(environment_variables, arguments.config_file),
    }
    report = masked_tree(report)
    if arguments.json:
        text = json.dumps(report, indent=2) + "\n"
    else:
        text = _report_text(report)
    sys.stdout.write(text)
    return 0


def _torch_facts() -> dict[str, str]:
    """Return facts about torch and its devices; the reason if torch cannot be imported."""
    try:
        torch = need("torch")
    except (ImportError, OSError) as error:
        return {"error": str(error)}
    torch_facts = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "not built in",
        "hip": torch.version.hip or "not built in",
        "accelerator": str(torch.accelerator.current_accelerator() or "none"),
        "devices": str(torch.accelerator.device_count()),
        "threads": str(torch.get_num_threads()),
        "backends": ", ".join(
            filter(
                torch.distributed.is_backend_available,
                ("gloo", "nccl", "mpi", "ucc", "xccl"),
            )
        ),
    }
    if torch.cuda.is_available():
        torch_facts["names"] = ", ".join(
            map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
        )
        torch_facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        torch_facts["cudnn"] = str(torch.backends.cudnn.version())
    return torch_facts


def _cluster_text(environment_variables: Mapping[str, str]) -> str:
    try:
        allocation = read_allocation(environment_variables)
    except HastenError as error:
        return f"cannot be read: {error}"
    if not allocation.source:
        return "none"
    return f"{allocation.source}, {allocation.num_machines} machines"


def _training_variables(environment_variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect training."""
    relevant_variables = {}
    for variable_name, value in sorted(environment_variables.items()):
        if _VARIABLES.match(variable_name):
            relevant_variables[variable_name] = value
    return relevant_variables


def _settings_report(
    environment_variables: Mapping[str, str], config_file: str | None
) -> dict[str, str]:
    settings_file = config_file or files.find(environment_variables)
    try:
        resolved = effective_settings(environment_variables, config_file)
    except HastenError as error:
        return {"file": str(settings_file), "error": str(error)}
    values = {}
    for path, entry in resolved.entries.items():
        values[".".join(path)] = (
            f"{masked_value(path[-1], entry.value)} ({entry.source})"
        )
    return {"file": str(settings_file or "none"), **values}


def _report_text(report: Mapping[str, Any]) -> str:
    lines = []
    for variable_name, value in report.items():
        if isinstance(value, dict):
            lines.append(f"- {variable_name}:")
            lines += [f"    {key}: {inner}" for key, inner in value.items()] or [
                "    none"
            ]
        else:
            lines.append(f"- {variable_name}: {value}")
    return "\n".join(lines) + "\n"
