"""The recipe of fp8 through torchao."""

from accelerate.utils import AORecipeKwargs


def run() -> object:
    recipe = AORecipeKwargs(pad_inner_dim=True, enable_fsdp_float8_all_gather=False)
    return [
        recipe.pad_inner_dim,
        recipe.enable_fsdp_float8_all_gather,
        str(recipe.module_filter_func),
    ]


PROCESSES = (1,)
