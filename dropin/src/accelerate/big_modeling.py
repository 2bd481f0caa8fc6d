"""Loading and placing big models, on hasten's placement and streaming."""

from accelerate._impl.environment.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from accelerate._impl.models.big_modeling import *
from hasten.bigmodel.meta import init_empty_weights, init_on_device
