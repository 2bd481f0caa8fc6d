"""fp8 through NVIDIA Transformer Engine, as functions on a model."""

from accelerate._impl.models.fp8 import *
