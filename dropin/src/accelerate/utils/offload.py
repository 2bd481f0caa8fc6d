"""Weights kept on disk: follows with big models."""

from accelerate import notyet

OffloadedWeightsLoader = notyet.klass("utils.OffloadedWeightsLoader", notyet.BIG_MODELS)
PrefixedDataset = notyet.klass("utils.PrefixedDataset", notyet.BIG_MODELS)
extract_submodules_state_dict = notyet.function("utils.extract_submodules_state_dict", notyet.BIG_MODELS)
load_offloaded_weight = notyet.function("utils.load_offloaded_weight", notyet.BIG_MODELS)
offload_state_dict = notyet.function("utils.offload_state_dict", notyet.BIG_MODELS)
offload_weight = notyet.function("utils.offload_weight", notyet.BIG_MODELS)
save_offload_index = notyet.function("utils.save_offload_index", notyet.BIG_MODELS)
