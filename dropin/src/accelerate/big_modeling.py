"""Loading and placing big models, on hasten's placement and streaming."""

from accelerate._impl.models.align import AlignDevicesHook
from accelerate._impl.models.big_modeling import *
from hasten.extensions.bigmodel.tensors import (
    CASTABLE as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
)
