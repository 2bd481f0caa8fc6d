"""fp8 through torchao, as functions on a model."""

from accelerate._impl.models.ao import *
