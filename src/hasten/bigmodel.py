"""`hasten.bigmodel`: the module name that users write for the extension of the same name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.extensions.bigmodel import LayerwiseCastingHook as LayerwiseCastingHook  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import (
        OffloadedWeightsLoader as OffloadedWeightsLoader,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import align_module_device as align_module_device  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import (
        attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import check_device_map as check_device_map  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import compute_module_sizes as compute_module_sizes  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import cpu_offload as cpu_offload  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import (
        cpu_offload_with_hook as cpu_offload_with_hook,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import disk_offload as disk_offload  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import dispatch_model as dispatch_model  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import find_tied_parameters as find_tied_parameters  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import get_balanced_memory as get_balanced_memory  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import get_max_memory as get_max_memory  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import has_offloaded_params as has_offloaded_params  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import (
        infer_auto_device_map as infer_auto_device_map,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import init_empty_weights as init_empty_weights  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import init_on_device as init_on_device  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import (
        load_checkpoint_in_model as load_checkpoint_in_model,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import offload_state_dict as offload_state_dict  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import (
        remove_hook_from_submodules as remove_hook_from_submodules,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import retie_parameters as retie_parameters  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.bigmodel import (
        set_module_tensor_to_device as set_module_tensor_to_device,
    )  # type: ignore[import-not-found, unused-ignore]
else:
    from hasten.extensions.bigmodel import __all__, __dir__, __getattr__  # noqa: F401
