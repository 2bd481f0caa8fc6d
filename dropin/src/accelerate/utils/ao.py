"""fp8 through torchao, as functions on a model."""

from accelerate._impl.models.fp8 import *
