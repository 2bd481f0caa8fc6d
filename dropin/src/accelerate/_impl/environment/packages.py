"""Probes: is a package, a device or a number format available?"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import metadata
from typing import Any

import torch

from accelerate._impl.environment.variables import is_package, parse_flag_from_env
from accelerate._impl.environment.versions import compare_versions
from accelerate._impl.surface.homes import settle

# Any in this file: decorated functions.
_torch_distributed_available = torch.distributed.is_available()
USE_TORCH_XLA = parse_flag_from_env("USE_TORCH_XLA", True)


def _is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    if not is_package(pkg_name):
        return False
    try:
        metadata.metadata(metadata_name or pkg_name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _says(doc: str, found: Callable[[], bool]) -> Callable[[], bool]:
    found.__doc__ = doc
    return found


def _probe(package: str, name: str | None = None) -> Callable[[], bool]:
    return _says(f"Whether {package} is installed.", lambda: _is_package_available(package, name))


is_datasets_available = _probe("datasets")
is_deepspeed_available = _probe("deepspeed")
is_lomo_available = _probe("lomo_optim")
is_msamp_available = _probe("msamp", "ms-amp")
is_peft_available = _probe("peft")
is_torchao_available = _probe("torchao")
is_rich_available = _probe("rich")
is_transformers_available = _probe("transformers")
is_wandb_available = _probe("wandb")
_PACKAGES = (
    "aim boto3 clearml comet_ml dvclive import_timer matplotlib pandas pytest sagemaker "
    "schedulefree swanlab timm torchdata torchvision tqdm trackio triton "
)
for _name in _PACKAGES.split():
    globals()[f"is_{_name}_available"] = _probe(_name)


def is_pynvml_available() -> bool:
    """Whether pynvml is installed, under either name."""
    return _is_package_available("pynvml") or _is_package_available("pynvml", "nvidia-ml-py")


is_amdsmi_available = _says("Whether amdsmi can be imported.", lambda: is_package("amdsmi"))


def is_tensorboard_available() -> bool:
    """Whether tensorboard or tensorboardX is installed."""
    return _is_package_available("tensorboard") or _is_package_available("tensorboardX")


def is_mlflow_available() -> bool:
    """Whether mlflow, or its small form, is installed."""
    return _is_package_available("mlflow") or (is_package("mlflow") and _has("mlflow-skinny"))


def _has(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed, at least in `min_version`."""
    return _is_package_available("numpy") and compare_versions("numpy", ">=", min_version)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed."""
    found = _is_package_available("bitsandbytes")
    return found and (min_version is None or compare_versions("bitsandbytes", ">=", min_version))


is_4bit_bnb_available = _says("Whether bitsandbytes knows four bits.", lambda: is_bnb_available("0.39.0"))
is_8bit_bnb_available = _says("Whether bitsandbytes knows eight bits.", lambda: is_bnb_available("0.37.2"))


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes works on more than CUDA."""
    return is_bnb_available("0.46.0")


def is_transformer_engine_available() -> bool:
    """Whether NVIDIA's (or Intel's) Transformer Engine is installed."""
    return is_package("transformer_engine") or is_package("intel_transformer_engine")


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine can scale blocks in fp8."""
    return (
        is_package("transformer_engine") and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
    )


def is_megatron_lm_available() -> bool:
    """Whether Megatron-LM is installed and asked for."""
    return parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM") and is_package("megatron")


is_pippy_available = _says("Whether torch has pipelines of its own.", lambda: True)
is_weights_only_available = _says("Whether torch.load can refuse code.", lambda: True)


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata has a loader with state."""
    return _is_package_available("torchdata") and compare_versions("torchdata", ">=", "0.8.0")


def is_torch_distributed_available() -> bool:
    """Whether this torch can talk to other processes."""
    return _torch_distributed_available


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed and has the device asked for; hasten does not train on it yet."""
    if check_is_tpu and check_is_gpu:
        raise AssertionError("The check_is_tpu and check_is_gpu cannot be true at the same time.")
    return False


@lru_cache
def is_cuda_available() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Whether the device is AMD's."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is an Apple device."""
    return torch.backends.mps.is_available()


def is_xccl_available() -> bool:
    """Whether torch was built with oneCCL."""
    available = getattr(torch.distributed.distributed_c10d, "is_xccl_available", None)
    return bool(available and available())


def _device_probe(kind: str, package: str | None) -> Callable[..., bool]:
    def available(check_device: bool = False) -> bool:
        if package is not None and not is_package(package):
            return False
        module = getattr(torch, kind, None)
        try:
            return bool(module is not None and module.is_available() and (not check_device or module.device_count()))
        except (RuntimeError, AttributeError):
            return False  # the device's library is there and its device is not

    available.__doc__ = f"Whether there is a device of kind {kind}."
    return available


is_xpu_available = _device_probe("xpu", None)
is_npu_available = _device_probe("npu", "torch_npu")
is_mlu_available = _device_probe("mlu", "torch_mlu")
is_musa_available = _device_probe("musa", "torch_musa")
is_sdaa_available = _device_probe("sdaa", "torch_sdaa")
is_neuron_available = _device_probe("neuron", "torch_neuronx")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether there is a Gaudi device."""
    return _device_probe("hpu", "habana_frameworks")()


is_habana_gaudi1 = _says("Whether the Gaudi device is of the first generation.", lambda: False)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the device computes in bfloat16."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    return not is_mps_available()


is_fp16_available = _says("Whether the device computes in float16.", lambda: not is_habana_gaudi1())


def is_fp8_available() -> bool:
    """Whether a library for fp8 is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def _required(package: str, available: Callable[[], bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not available():
                raise ImportError(f"`{func.__name__}` requires {package}; install it with `pip install {package}`.")
            return func(*args, **kwargs)

        return run

    return decorate


deepspeed_required = _required("deepspeed", is_deepspeed_available)
torchao_required = _required("torchao", is_torchao_available)


settle(__name__, "accelerate.utils.imports")
