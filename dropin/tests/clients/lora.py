"""A peft LoRA fine-tune under Trainer. Usage: lora.py FOLDER OUT.json"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def data(size, seed):
    rows = torch.randint(0, 100, (size, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in rows]


def main(folder, out):
    set_seed(3)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        seed=7,
        disable_tqdm=True,
        max_grad_norm=0.5,
        save_strategy="epoch",
    )
    trainer = Trainer(
        model=get_peft_model(LlamaForCausalLM(config), lora),
        args=args,
        train_dataset=data(22, 0),
        eval_dataset=data(9, 1),
    )
    trainer.train()
    kept = ("loss", "grad_norm", "learning_rate")
    checkpoint = sorted(Path(folder).iterdir())[0]
    result = {
        "log": [{key: value for key, value in row.items() if key in kept} for row in trainer.state.log_history],
        "eval_loss": trainer.evaluate()["eval_loss"],
        "weights": float(sum(p.double().abs().sum() for n, p in trainer.model.named_parameters() if "lora" in n)),
        "adapter": sorted(path.name for path in checkpoint.iterdir() if path.name.startswith("adapter")),
    }
    if int(os.environ.get("RANK", "0")) == 0:
        Path(out).write_text(json.dumps(result, indent=0) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:3])
