"""Loading and placing big models: follows later."""

from accelerate import notyet
from accelerate.utils.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING

__all__ = ["SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING"]

for _name in [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
]:
    globals()[_name] = notyet.function(_name, notyet.BIG_MODELS)
