"""What is installed here, and on which device."""

from accelerate import utils


def run() -> object:
    names = "cuda bf16 deepspeed transformers datasets peft tensorboard wandb npu mps torch_xla megatron_lm timm aim"
    return {name: bool(getattr(utils, f"is_{name}_available")()) for name in names.split()}


PROCESSES = (1,)
