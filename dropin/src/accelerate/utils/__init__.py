"""Every established name of `accelerate.utils`: what its modules define, and what they show of hasten."""

from types import MappingProxyType
from typing import Final

from accelerate._impl.surface.lazy import lazy
from accelerate.utils.tqdm import tqdm

_HOMES: Final = MappingProxyType(
    {
        "": "megatron_lm",
        "accelerate.commands.config.default": "write_basic_config",
        "accelerate.parallelism_config": "ParallelismConfig",
        "accelerate.utils.deepspeed": "DummyOptim DummyScheduler",
        "accelerate.utils.memory": "should_reduce_batch_size",
        "accelerate.utils.modeling": (
            "align_module_device convert_file_size_to_int find_tied_parameters get_max_memory retie_parameters"
        ),
        "accelerate.utils.megatron_lm": (
            "AbstractTrainStep BertTrainStep GPTTrainStep MegatronLMDummyDataLoader MegatronLMDummyScheduler T5TrainStep avg_losses_across_data_parallel_group"
        ),
        "accelerate.utils.offload": "OffloadedWeightsLoader PrefixedDataset load_offloaded_weight offload_state_dict offload_weight save_offload_index",
        "accelerate.utils.operations": "convert_to_fp32",
        "accelerate.utils.other": "check_os_kernel",
        "accelerate.utils.random": "set_seed",
        "accelerate.utils.tqdm": "tqdm",
    }
)
_WHOLE = (  # what loads soonest comes first
    "imports versions constants environment random memory torch_xla ao transformer_engine operations offload modeling dataclasses other bnb deepspeed fsdp_utils launch"
)
__getattr__, __dir__ = lazy(__name__, _HOMES, _WHOLE)
