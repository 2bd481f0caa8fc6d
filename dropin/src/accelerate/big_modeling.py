"""Loading and placing big models, on hasten's placement and streaming."""

from accelerate._impl.models.big_modeling import *
from hasten.bigmodel.casting import CASTABLE as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from hasten.bigmodel.meta import init_empty_weights, init_on_device
