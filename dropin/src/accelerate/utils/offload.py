"""Weights kept on disk."""

from accelerate._impl.models.align import PrefixedDataset
from accelerate._impl.models.modeling import extract_submodules_state_dict
from hasten.extensions.bigmodel.offload_files import *
