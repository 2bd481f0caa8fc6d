"""Commands, launchers and probes on a machine with a device."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from observing import CUDA, Seen, observe, plain

WORKER = """
import json, os, sys
import torch
from accelerate import Accelerator
names = ("ACCELERATE_", "FSDP_", "LOCAL_RANK", "RANK", "WORLD_SIZE", "CUDA_VISIBLE", "NCCL_", "OMP_", "TORCHELASTIC_RUN")
before = sorted(f"{key}={value}" for key, value in os.environ.items() if key.startswith(names))
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(4, 2))
out = model(torch.ones(1, 4, device=accelerator.device))
accelerator.backward(out.sum())
print("FOUND " + json.dumps({
    "device": str(accelerator.device), "type": str(accelerator.distributed_type), "precision": accelerator.mixed_precision,
    "processes": accelerator.num_processes, "model": type(model).__name__, "output": str(out.dtype), "arguments": sys.argv[1:],
    "scaler": accelerator.scaler is not None, "steps": accelerator.gradient_accumulation_steps,
    "dynamo": str(accelerator.state.dynamo_plugin.backend), "variables": before,
}))
"""

PACKAGES = [
    "4bit_bnb",
    "8bit_bnb",
    "aim",
    "amdsmi",
    "bf16",
    "bitsandbytes_multi_backend",
    "bnb",
    "boto3",
    "clearml",
    "comet_ml",
    "cuda",
    "datasets",
    "deepspeed",
    "dvclive",
    "fp16",
    "fp8",
    "hpu",
    "import_timer",
    "lomo",
    "matplotlib",
    "megatron_lm",
    "mlflow",
    "mlu",
    "mps",
    "msamp",
    "musa",
    "neuron",
    "npu",
    "numpy",
    "pandas",
    "peft",
    "pippy",
    "pynvml",
    "pytest",
    "rich",
    "rocm",
    "sagemaker",
    "schedulefree",
    "sdaa",
    "swanlab",
    "tensorboard",
    "timm",
    "torch_distributed",
    "torch_xla",
    "torchao",
    "torchdata",
    "torchdata_stateful_dataloader",
    "torchvision",
    "tqdm",
    "trackio",
    "transformer_engine",
    "transformer_engine_mxfp8",
    "transformers",
    "triton",
    "wandb",
    "weights_only",
    "xccl",
    "xpu",
]
"""What `is_*_available` functions look for."""
NEEDS = [
    "aim",
    "bnb",
    "clearml",
    "comet_ml",
    "cpu",
    "cuda",
    "cuda_or_hpu",
    "cuda_or_xpu",
    "datasets",
    "deepspeed",
    "dvclive",
    "fp16",
    "fp8",
    "fsdp2",
    "huggingface_suite",
    "import_timer",
    "matplotlib",
    "mlflow",
    "mlu",
    "mps",
    "multi_device",
    "multi_gpu",
    "multi_gpu_or_xpu",
    "multi_xpu",
    "musa",
    "neuron",
    "non_cpu",
    "non_hpu",
    "non_torch_xla",
    "non_xpu",
    "npu",
    "pandas",
    "peft",
    "pippy",
    "schedulefree",
    "sdaa",
    "single_device",
    "single_gpu",
    "single_xpu",
    "swanlab",
    "tensorboard",
    "timm",
    "torch_min_version",
    "torchao",
    "torchdata_stateful_dataloader",
    "torchvision",
    "tp",
    "tpu",
    "trackers",
    "trackio",
    "transformer_engine",
    "transformer_engine_mxfp8",
    "transformers",
    "triton",
    "wandb",
    "xpu",
]
"""What `require_*` decorators ask for."""


def _command(*words: str, limit: float = 70) -> tuple[int, str, str]:
    """Exit code, output and errors of an accelerate command."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *words]
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    child = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, stdin=none, text=True, start_new_session=True
    )
    try:
        out, errors = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        child.terminate()  # torchrun ends its workers then
        try:
            child.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
        raise
    return child.returncode, out, errors


def _launched(see: Seen, *options: str) -> None:
    Path("worker.py").write_text(WORKER)
    code, out, errors = _command("launch", *options, "worker.py", "--given", "3")
    see("exit code", code)
    lines = out.splitlines()
    reported: dict[str, Any] = json.loads(
        next((line[6:] for line in lines if line.startswith("FOUND ")), "{}")
    )
    for key, value in reported.items():
        see(key, value)
    see("other lines", [plain(line) for line in lines if not line.startswith("FOUND ")])
    error_lines = [
        plain(line)
        for line in errors.splitlines()
        if line.strip() and not re.match(r"\[?[WI]\d{4}|.*Warning", line)
    ]
    see("errors", error_lines[-6:] if code else error_lines[:20])


@observe("launch", limit=120)
def launched(see: Seen) -> None:
    _launched(see)


@observe("launch", limit=120)
def launched_in_fp16(see: Seen) -> None:
    _launched(
        see, "--mixed_precision", "fp16" if CUDA else "bf16", "--num_processes", "1"
    )


@observe("launch 2", limit=120)
def launched_on_the_cpu(see: Seen) -> None:
    _launched(see, "--cpu")


@observe("launch 2", limit=120, cuda=True)
def launched_as_several(see: Seen) -> None:
    _launched(see, "--multi_gpu", "--num_processes", "1")


@observe("launch 3", limit=120, cuda=True)
def launched_by_number(see: Seen) -> None:
    _launched(
        see,
        "--gpu_ids",
        "0",
        "--gradient_accumulation_steps",
        "4",
        "--dynamo_backend",
        "eager",
    )


@observe("launch 3", limit=120, cuda=True)
def launched_with_too_many(see: Seen) -> None:
    _launched(see, "--multi_gpu", "--num_processes", "2", "--num_machines", "1")


@observe("launch 4", limit=120, cuda=True)
def launched_with_shards(see: Seen) -> None:
    _launched(see, "--use_fsdp", "--fsdp_version", "2", "--num_processes", "1")


@observe("launch 4", limit=120)
def launched_by_a_file(see: Seen) -> None:
    code, out, errors = _command(
        "config", "default", "--config_file", "config.yaml", "--mixed_precision", "bf16"
    )
    see("configured", [code, plain(out), plain(errors)])
    see("file", lambda: Path("config.yaml").read_text().splitlines())
    _launched(see, "--config_file", "config.yaml")


@observe("commands", limit=120)
def the_environment(see: Seen) -> None:
    code, out, _ = _command("env")
    see("exit code", code)
    for line in out.splitlines():
        if line.strip():
            name, _, value = line.partition(":")
            see(
                plain(name.strip()),
                plain(value.strip())
                if "memory" not in name.lower() and "RAM" not in name
                else "some",
            )


@observe("commands", limit=120)
def default_settings(see: Seen) -> None:
    from accelerate.utils import write_basic_config

    for precision in ("no", "fp16", "bf16"):
        see(
            precision,
            lambda precision=precision: str(
                write_basic_config(precision, f"{precision}.json")
            ),
        )
        see(
            f"{precision}, file",
            lambda precision=precision: json.loads(
                Path(f"{precision}.json").read_text()
            ),
        )
    see("again", lambda: write_basic_config("no", "no.json"))
    see("wrong", lambda: write_basic_config("fp5", "wrong.json"))
    from accelerate.commands.config.default import default_command_parser  # noqa: F401

    code, out, errors = _command("config", "default", "--config_file", "config.yaml")
    see("command", [code, plain(out), plain(errors)])
    see("command, file", lambda: Path("config.yaml").read_text().splitlines())


@observe("test command", limit=200)
def the_test_command(see: Seen) -> None:
    _command("config", "default", "--config_file", "config.yaml")
    code, out, errors = _command("test", "--config_file", "config.yaml", limit=150)
    see("exit code", code)
    see("last line", out.strip().splitlines()[-1:])
    if code:
        see("errors", plain(errors[-300:]))


@observe("probes")
def what_is_available(see: Seen) -> None:
    import accelerate.utils as tools

    for name in (
        "get_gpu_info",
        "check_cuda_p2p_ib_support",
        "check_cuda_fp8_capability",
    ):
        see(name, lambda name=name: getattr(tools, name)())
    see("cuda", lambda: tools.is_cuda_available())
    see("check device", lambda: tools.is_cuda_available(check_device=True))
    for value in (True, False):
        see(
            f"bf16, {value}",
            lambda value=value: tools.is_bf16_available(ignore_tpu=value),
        )


@observe("probes")
def probes_of_modules(see: Seen) -> None:
    from accelerate.utils import environment, imports

    for name in (
        "get_gpu_info",
        "check_cuda_p2p_ib_support",
        "check_cuda_fp8_capability",
        "get_cpu_distributed_information",
    ):
        see(name, lambda name=name: getattr(environment, name)())
    for name in ("get_driver_version", "is_multi_device"):
        see(name, lambda name=name: bool(getattr(environment, name)()))
    for name in PACKAGES:
        see(name, lambda name=name: getattr(imports, f"is_{name}_available")())
    see("affinity", lambda: environment.set_numa_affinity(0))
    see("override", lambda: environment.override_numa_affinity(0))


@observe("probes")
def names_for_tests(see: Seen) -> None:
    from accelerate.test_utils import testing

    see("device", testing.torch_device)
    for name in NEEDS:
        see(
            f"require_{name}",
            lambda name=name: _skipped(getattr(testing, f"require_{name}")),
        )
    for name in (
        "device_count",
        "get_launch_command",
        "get_backend",
        "memory_allocated_func",
        "DEFAULT_LAUNCH_COMMAND",
    ):
        see(name, lambda name=name: _called(getattr(testing, name)))


def _called(call: Any) -> Any:
    returned = call() if callable(call) else call
    return (
        [str(word).replace(sys.executable, "python") for word in returned]
        if isinstance(returned, list)
        else returned
    )


def _skipped(decorate: Any) -> Any:
    def case() -> None:
        """Do nothing."""

    decorated = decorate(case)
    return [
        getattr(decorated, "__unittest_skip__", False),
        getattr(decorated, "__unittest_skip_why__", ""),
    ]


@observe("probes", limit=100)
def a_notebook(see: Seen) -> None:
    from accelerate import notebook_launcher

    def task(number: int) -> Any:
        from accelerate import Accelerator

        accelerator = Accelerator()
        return [
            str(accelerator.device),
            accelerator.num_processes,
            accelerator.mixed_precision,
            number,
        ]

    see("one", lambda: notebook_launcher(task, (3,), num_processes=1))
    see(
        "in fp16",
        lambda: notebook_launcher(task, (3,), num_processes=1, mixed_precision="bf16"),
    )
    see("without a number", lambda: notebook_launcher(task, (3,)))
    see(
        "wrong precision",
        lambda: notebook_launcher(task, (3,), num_processes=1, mixed_precision="fp5"),
    )
    see("variables", sorted(key for key in os.environ if key.startswith("ACCELERATE_")))


@observe("probes")
def small_tools(see: Seen) -> None:
    import accelerate.utils as tools
    from accelerate import Accelerator
    from accelerate.utils import other, versions

    see("environment", lambda: tools.get_int_from_env(["NOTHING"], 3))
    see(
        "versions",
        lambda: [
            versions.is_torch_version(">=", "2.0"),
            versions.compare_versions("torch", ">=", "1.0"),
        ],
    )
    see("port", lambda: other.is_port_in_use(1))
    see("size", lambda: other.convert_bytes(2**31))
    see("kernel", lambda: other.check_os_kernel())
    see("pretty", lambda: tools.get_pretty_name(torch.nn.Linear(1, 1)))
    see("cleared environment", lambda: tools.clear_environment().__enter__())
    Accelerator()
    see(
        "context",
        lambda: type(tools.get_mixed_precision_context_manager(True)).__name__,
    )
    see(
        "context, off",
        lambda: type(tools.get_mixed_precision_context_manager(False)).__name__,
    )
    see("workspace", lambda: tools.set_seed(3, deterministic=True))
    torch.use_deterministic_algorithms(False)
