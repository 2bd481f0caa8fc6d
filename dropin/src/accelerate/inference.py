"""Pipelines for inference, on top of hasten's: a model divided over all processes."""

from accelerate._impl.models.inference import *
