"""Names of files, kinds and limits that scripts import."""

from accelerate._impl.environment.constants import *
from hasten.bigmodel.tensors import CASTABLE as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
