"""The recipe of fp8 through torchao."""

from accelerate.utils import AORecipeKwargs


def run() -> object:
    made = AORecipeKwargs(pad_inner_dim=True, enable_fsdp_float8_all_gather=False)
    return [
        made.pad_inner_dim,
        made.enable_fsdp_float8_all_gather,
        str(made.module_filter_func),
    ]


PROCESSES = (1,)
