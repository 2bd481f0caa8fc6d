"""fp8 through NVIDIA Transformer Engine, as functions on a model."""

from accelerate._impl.models.transformer_engine import *
