"""Weights kept on disk."""

from accelerate._impl.models.offload import *
from hasten.bigmodel.align import PrefixedDataset
from hasten.bigmodel.offload_files import OffloadedWeightsLoader
