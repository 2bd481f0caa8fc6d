"""A peft LoRA fine-tune under Trainer. Usage: lora.py FOLDER OUT.json"""

from pathlib import Path

import torch
from outcome import SHORT, TINY, history, record, weights
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)


def data(size, seed):
    rows = torch.randint(
        0, 100, (size, 12), generator=torch.Generator().manual_seed(seed)
    )
    return [{"input_ids": row, "labels": row} for row in rows]


def main(folder):
    set_seed(3)
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        lora_dropout=0.1,
    )
    args = TrainingArguments(
        folder,
        num_train_epochs=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        save_strategy="epoch",
        **SHORT,
    )
    trainer = Trainer(
        model=get_peft_model(LlamaForCausalLM(LlamaConfig(**TINY)), lora),
        args=args,
        train_dataset=data(22, 0),
        eval_dataset=data(9, 1),
    )
    trainer.train()
    checkpoint = sorted(Path(folder).iterdir())[0]
    return {
        "log": history(trainer, "loss", "grad_norm", "learning_rate"),
        "eval_loss": trainer.evaluate()["eval_loss"],
        "weights": weights(
            p for name, p in trainer.model.named_parameters() if "lora" in name
        ),
        "adapter": sorted(
            path.name
            for path in checkpoint.iterdir()
            if path.name.startswith("adapter")
        ),
    }


if __name__ == "__main__":
    record(main)
