"""Probes: is a package, a device or a number format available?"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module, metadata
from typing import Any

import torch

from accelerate._impl.environment.variables import parse_flag_from_env
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


def _says(doc: str, found: Callable[[], bool]) -> Callable[[], bool]:
    found.__doc__ = doc
    return found


def _probe(package: str, *names: str) -> Callable[[], bool]:
    """A function that says whether a package is installed, from a distribution of its own name or of one of these."""
    names = names or (package,)
    return _says(f"Whether {package} is installed.", lambda: any(_is_package_available(package, one) for one in names))


is_datasets_available = _probe("datasets")
is_deepspeed_available = _probe("deepspeed")
is_lomo_available = _probe("lomo_optim")
is_mlflow_available = _probe("mlflow", "mlflow", "mlflow-skinny")
is_msamp_available = _probe("msamp", "ms-amp")
is_peft_available = _probe("peft")
is_pynvml_available = _probe("pynvml", "pynvml", "nvidia-ml-py")
is_torchao_available = _probe("torchao")
is_timm_available = _probe("timm")
is_transformers_available = _probe("transformers")
is_wandb_available = _probe("wandb")
_PACKAGES = "aim boto3 clearml comet_ml dvclive import_timer matplotlib pandas pytest sagemaker schedulefree swanlab torchdata torchvision tqdm trackio triton "
for _name in _PACKAGES.split():
    globals()[f"is_{_name}_available"] = _probe(_name)


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed, at least in `min_version`."""
    return _is_package_available("numpy") and compare_versions("numpy", ">=", min_version)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed."""
    found = _is_package_available("bitsandbytes")
    return found and (min_version is None or compare_versions("bitsandbytes", ">=", min_version))


is_4bit_bnb_available = _says("Whether bitsandbytes knows four bits.", lambda: is_bnb_available("0.39.0"))
is_8bit_bnb_available = _says("Whether bitsandbytes knows eight bits.", lambda: is_bnb_available("0.37.2"))
is_bitsandbytes_multi_backend_available = _says(
    "Whether bitsandbytes works on more than CUDA.", lambda: is_bnb_available("0.46.0")
)
is_rich_available = _says(
    "Whether rich is installed and asked for.",
    lambda: _is_package_available("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH"),
)
is_amdsmi_available = _says("Whether amdsmi can be imported.", lambda: available("amdsmi"))
is_tensorboard_available = _says(
    "Whether tensorboard or tensorboardX is installed.",
    lambda: _is_package_available("tensorboard") or _is_package_available("tensorboardX"),
)
is_torchdata_stateful_dataloader_available = _says(
    "Whether torchdata has a loader with state.",
    lambda: _is_package_available("torchdata") and compare_versions("torchdata", ">=", "0.8.0"),
)
is_transformer_engine_available = _says(
    "Whether NVIDIA's (or Intel's) Transformer Engine is installed.",
    lambda: available("transformer_engine") or available("intel_transformer_engine"),
)
is_transformer_engine_mxfp8_available = _says(
    "Whether Transformer Engine can scale blocks in fp8.",
    lambda: (
        available("transformer_engine") and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10,)
    ),
)
is_megatron_lm_available = _says(
    "Whether Megatron-LM is installed and asked for.",
    lambda: parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM") and available("megatron"),
)
is_pippy_available = _says("Whether torch has pipelines of its own.", lambda: True)
is_weights_only_available = _says("Whether torch.load can refuse code.", lambda: True)
is_torch_distributed_available = _says("Whether torch has process groups.", lambda: _torch_distributed_available)
is_rocm_available = _says("Whether the device is AMD's.", lambda: bool(torch.version.hip) and torch.cuda.is_available())
is_xccl_available = _says("Whether torch was built with oneCCL.", lambda: torch.distributed.is_xccl_available())
is_fp8_available = _says(
    "Whether a library for fp8 is installed.",
    lambda: is_msamp_available() or is_transformer_engine_available() or is_torchao_available(),
)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed and has the device asked for."""
    if check_is_tpu and check_is_gpu:
        raise AssertionError("The check_is_tpu and check_is_gpu cannot be true at the same time.")
    if not (USE_TORCH_XLA and available("torch_xla")):
        return False
    wanted = ("TPU",) if check_is_tpu else ("CUDA", "GPU")
    return not (check_is_tpu or check_is_gpu) or import_module("torch_xla.runtime").device_type() in wanted


@lru_cache
def is_cuda_available() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is an Apple device."""
    return torch.backends.mps.is_available()


def _device_probe(kind: str, package: str | None) -> Callable[..., bool]:
    def there(check_device: bool = False) -> bool:
        if package is not None and not available(package):
            return False
        module = getattr(torch, kind, None)
        try:
            return bool(module is not None and module.is_available() and (not check_device or module.device_count()))
        except (RuntimeError, AttributeError):
            return False  # the device's library is there and its device is not

    there.__doc__ = f"Whether there is a device of kind {kind}."
    return there


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
    if is_xpu_available():
        return bool(torch.xpu.is_bf16_supported())
    if is_cuda_available():
        return bool(torch.cuda.is_bf16_supported())
    return not is_mps_available()


is_fp16_available = _says("Whether the device computes in float16.", lambda: not is_habana_gaudi1())


def _required(package: str, installed: Callable[[], bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not installed():
                raise ImportError(message("package_required", package))
            return func(*args, **kwargs)

        return run

    return decorate


deepspeed_required = _required("deepspeed", lambda: is_deepspeed_available())
torchao_required = _required("torchao", lambda: is_torchao_available())
