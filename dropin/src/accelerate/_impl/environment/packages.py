"""Probes: is a package, a device or a number format available?"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module, metadata
from typing import Any

import torch

from accelerate._impl.environment.variables import (
    parse_flag_from_env,
    patch_environment,
)
from accelerate._impl.environment.versions import compare_versions
from accelerate._impl.surface.messages import message
from hasten.optional import available

# Any in this file: decorated functions.
_torch_distributed_available = torch.distributed.is_available()
USE_TORCH_XLA = parse_flag_from_env("USE_TORCH_XLA", True)


def _is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    if not available(pkg_name):
        return False
    try:
        metadata.metadata(metadata_name or pkg_name)
    except metadata.PackageNotFoundError:
        return False
    return True


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    return _is_package_available("numpy") and compare_versions(
        "numpy", ">=", min_version
    )


def is_bnb_available(min_version: str | None = None) -> bool:
    is_installed = _is_package_available("bitsandbytes")
    return is_installed and (
        min_version is None or compare_versions("bitsandbytes", ">=", min_version)
    )


_PACKAGES = "amdsmi boto3 clearml comet_ml datasets deepspeed dvclive import_timer lomo:lomo_optim matplotlib mlflow:mlflow:mlflow-skinny msamp:msamp:ms-amp pandas peft pynvml:pynvml:nvidia-ml-py pytest sagemaker schedulefree swanlab timm torchdata torchvision tqdm trackio transformers triton wandb"
_FOUND: dict[str, Callable[[], bool]] = {
    "aim": lambda: (
        _is_package_available("aim") and compare_versions("aim", "<", "4.0.0")
    ),
    "torchao": lambda: (
        _is_package_available("torchao") and compare_versions("torchao", ">=", "0.6.1")
    ),
    "4bit_bnb": lambda: is_bnb_available("0.39.0"),
    "8bit_bnb": lambda: is_bnb_available("0.37.2"),
    "bitsandbytes_multi_backend": lambda: is_bnb_available("0.46.0"),
    "rich": lambda: (
        _is_package_available("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH")
    ),
    "tensorboard": lambda: any(
        map(_is_package_available, ("tensorboard", "tensorboardX"))
    ),
    "torchdata_stateful_dataloader": lambda: (
        _answer_probe("torchdata") and compare_versions("torchdata", ">=", "0.8.0")
    ),
    "transformer_engine": lambda: any(
        map(_is_package_available, ("transformer_engine", "intel_transformer_engine"))
    ),
    "transformer_engine_mxfp8": lambda: (
        _answer_probe("transformer_engine")
        and is_cuda_available()
        and torch.cuda.get_device_capability() >= (10,)
    ),
    "megatron_lm": lambda: (
        parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM") and available("megatron")
    ),
    "pippy": lambda: True,  # torch has pipelines of its own
    "weights_only": lambda: True,  # which torch.load knows
    "torch_distributed": lambda: _torch_distributed_available,
    "rocm": lambda: bool(torch.version.hip) and torch.cuda.is_available(),
    "xccl": lambda: torch.distributed.is_xccl_available(),
    "fp8": lambda: any(map(_answer_probe, ("msamp", "transformer_engine", "torchao"))),
    "fp16": lambda: not is_habana_gaudi1(),
}


def _make_probe(package: str, *names: str) -> Callable[[], bool]:
    """Return a function that says whether a package is installed, from a distribution of its own name or of one of these."""
    return lambda: any(
        _is_package_available(package, distribution)
        for distribution in names or (package,)
    )


_FOUND |= {
    one.partition(":")[0]: _make_probe(*(one.split(":")[1:] or [one]))
    for one in _PACKAGES.split()
}
for _name, _found in _FOUND.items():
    _found.__doc__ = f"Whether {_name} can be used."
    globals()[f"is_{_name}_available"] = _found


# type checkers take the table for it
def __getattr__(name: str) -> Callable[..., bool]:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _answer_probe(name: str) -> bool:
    """Return the answer of `is_NAME_available`, which tests replace."""
    probe: Callable[[], bool] = globals()[f"is_{name}_available"]
    return probe()


@lru_cache
def is_torch_xla_available(
    check_is_tpu: bool = False, check_is_gpu: bool = False
) -> bool:
    if check_is_tpu and check_is_gpu:
        raise AssertionError("The check_is_tpu and check_is_gpu cannot both be true.")
    if not (USE_TORCH_XLA and available("torch_xla")):
        return False
    device_kinds = ("TPU",) if check_is_tpu else ("CUDA", "GPU")
    return (
        not (check_is_tpu or check_is_gpu)
        or import_module("torch_xla.runtime").device_type() in device_kinds
    )


def is_cuda_available() -> bool:
    """Return whether there is a CUDA device, asked in a way that lets this process fork afterwards."""
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    return torch.backends.mps.is_available() and compare_versions(
        "torch", ">=", min_version
    )


def _device_probe(kind: str, package: str | None) -> Callable[..., bool]:
    def is_there(check_device: bool = False) -> bool:
        if package is not None and not available(package):
            return False
        module = getattr(torch, kind, None)
        try:
            return bool(
                module is not None
                and module.is_available()
                and (not check_device or module.device_count())
            )
        except (RuntimeError, AttributeError):
            return False  # the device's library is there and its device is not

    is_there.__doc__ = f"Whether there is a device of kind {kind}."
    return lru_cache(is_there)


is_xpu_available = _device_probe("xpu", None)
is_npu_available = _device_probe("npu", "torch_npu")
is_mlu_available = _device_probe("mlu", "torch_mlu")
is_musa_available = _device_probe("musa", "torch_musa")
is_sdaa_available = _device_probe("sdaa", "torch_sdaa")
is_neuron_available = _device_probe("neuron", "torch_neuronx")
is_hpu_available = _device_probe("hpu", "habana_frameworks")


def is_habana_gaudi1() -> bool:
    return False


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    if is_xpu_available():
        return bool(torch.xpu.is_bf16_supported())
    if is_cuda_available():
        return bool(torch.cuda.is_bf16_supported())
    return not is_mps_available()


def _is_required(package: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not _answer_probe(package):
                raise ImportError(message("package_required", package))
            return func(*args, **kwargs)

        return run

    return decorate


deepspeed_required = _is_required("deepspeed")
torchao_required = _is_required("torchao")
