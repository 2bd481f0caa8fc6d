"""Models larger than the device: meta tensors, device maps, weights streamed from host memory or files, loading.

Start with `dispatch.py` (places a model), then `device_map.py` with `placement_plan.py` (choose a device for each module), `stream.py` (copies
weights ahead of the forward) and `load.py` (reads checkpoints into placed models). The names in `__all__` are public.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from hasten.lazy import exports

if TYPE_CHECKING:
    from hasten.extensions.bigmodel.device_map import (
        check_device_map as check_device_map,
    )
    from hasten.extensions.bigmodel.device_map import (
        compute_module_sizes as compute_module_sizes,
    )
    from hasten.extensions.bigmodel.device_map import (
        find_tied_parameters as find_tied_parameters,
    )
    from hasten.extensions.bigmodel.device_map import (
        get_balanced_memory as get_balanced_memory,
    )
    from hasten.extensions.bigmodel.device_map import get_max_memory as get_max_memory
    from hasten.extensions.bigmodel.device_map import (
        infer_auto_device_map as infer_auto_device_map,
    )
    from hasten.extensions.bigmodel.device_map import (
        retie_parameters as retie_parameters,
    )
    from hasten.extensions.bigmodel.dispatch import cpu_offload as cpu_offload
    from hasten.extensions.bigmodel.dispatch import (
        cpu_offload_with_hook as cpu_offload_with_hook,
    )
    from hasten.extensions.bigmodel.dispatch import disk_offload as disk_offload
    from hasten.extensions.bigmodel.dispatch import dispatch_model as dispatch_model
    from hasten.extensions.bigmodel.load import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )
    from hasten.extensions.bigmodel.load import (
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from hasten.extensions.bigmodel.offload_files import (
        OffloadedWeightsLoader as OffloadedWeightsLoader,
    )
    from hasten.extensions.bigmodel.offload_files import (
        offload_state_dict as offload_state_dict,
    )
    from hasten.extensions.bigmodel.tensors import (
        align_module_device as align_module_device,
    )
    from hasten.extensions.bigmodel.tensors import (
        attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
    )
    from hasten.extensions.bigmodel.tensors import (
        has_offloaded_params as has_offloaded_params,
    )
    from hasten.extensions.bigmodel.tensors import (
        remove_hook_from_submodules as remove_hook_from_submodules,
    )
    from hasten.extensions.bigmodel.tensors import (
        set_module_tensor_to_device as set_module_tensor_to_device,
    )
    from hasten.modules.hooks import LayerwiseCastingHook as LayerwiseCastingHook
    from hasten.modules.meta import init_empty_weights as init_empty_weights
    from hasten.modules.meta import init_on_device as init_on_device

# public name -> the module that defines it
_PUBLIC: Final = MappingProxyType[str, str](
    {
        "check_device_map": "hasten.extensions.bigmodel.device_map",
        "compute_module_sizes": "hasten.extensions.bigmodel.device_map",
        "find_tied_parameters": "hasten.extensions.bigmodel.device_map",
        "get_balanced_memory": "hasten.extensions.bigmodel.device_map",
        "get_max_memory": "hasten.extensions.bigmodel.device_map",
        "infer_auto_device_map": "hasten.extensions.bigmodel.device_map",
        "retie_parameters": "hasten.extensions.bigmodel.device_map",
        "cpu_offload": "hasten.extensions.bigmodel.dispatch",
        "cpu_offload_with_hook": "hasten.extensions.bigmodel.dispatch",
        "disk_offload": "hasten.extensions.bigmodel.dispatch",
        "dispatch_model": "hasten.extensions.bigmodel.dispatch",
        "load_checkpoint_and_dispatch": "hasten.extensions.bigmodel.load",
        "load_checkpoint_in_model": "hasten.extensions.bigmodel.load",
        "init_empty_weights": "hasten.modules.meta",
        "init_on_device": "hasten.modules.meta",
        "OffloadedWeightsLoader": "hasten.extensions.bigmodel.offload_files",
        "offload_state_dict": "hasten.extensions.bigmodel.offload_files",
        "align_module_device": "hasten.extensions.bigmodel.tensors",
        "attach_layerwise_casting_hooks": "hasten.extensions.bigmodel.tensors",
        "has_offloaded_params": "hasten.extensions.bigmodel.tensors",
        "remove_hook_from_submodules": "hasten.extensions.bigmodel.tensors",
        "set_module_tensor_to_device": "hasten.extensions.bigmodel.tensors",
        "LayerwiseCastingHook": "hasten.modules.hooks",
    }
)

__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]

# hidden from type checkers, which would otherwise accept any attribute
if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(__name__, _PUBLIC, extensible=True)
