"""transformers' Trainer with sequences split over two processes, or whole on one. Usage: sequence_trainer.py FOLDER OUT.json"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "clients"))
import torch
from outcome import SHORT, history, record
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

ENGINE = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def data(size, seed, prompts=True):
    g = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(size):
        tokens = torch.randint(0, 64, (16,), generator=g)
        labels = tokens.clone()
        labels[: number % 9 if prompts else 0] = -100
        samples.append(
            {"input_ids": tokens, "labels": labels, "position_ids": torch.arange(16)}
        )
    return samples


def main(folder):
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    split = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=processes,
        dp_replicate_size=1,
        sp_handler=handler,
    )
    set_seed(3)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
    engine_settings = (
        {"deepspeed": ENGINE, "parallelism_config": split} if processes > 1 else {}
    )
    args = TrainingArguments(
        folder,
        max_steps=8,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        optim="adamw_torch",
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=4,
        per_device_eval_batch_size=8 // processes,
        **SHORT,
        **engine_settings,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data(24, 0),
        eval_dataset=data(16, 1, prompts=False),
    )
    trainer.train()
    return history(trainer, "loss", "grad_norm", "learning_rate", "eval_loss", "step")


if __name__ == "__main__":
    record(main)
