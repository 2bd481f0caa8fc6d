"""trl's SFTTrainer for a few steps. Usage: sft.py FOLDER OUT.json"""

import json
import os
import random
import sys
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer


def tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def data():
    chance = random.Random(0)
    line = lambda: " ".join(f"w{chance.randrange(60)}" for _ in range(chance.randint(4, 14)))  # noqa: E731
    return Dataset.from_list([{"text": line()} for _ in range(20)])


def main(folder, out):
    set_seed(3)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1)
    )
    args = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        seed=7,
        disable_tqdm=True,
        max_length=32,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
    )
    trainer = SFTTrainer(model=model, args=args, train_dataset=data(), processing_class=tokenizer())
    trainer.train()
    kept = ("loss", "grad_norm", "learning_rate", "mean_token_accuracy", "num_tokens", "entropy")
    result = {
        "log": [{key: value for key, value in row.items() if key in kept} for row in trainer.state.log_history],
        "weights": float(sum(p.double().abs().sum() for p in trainer.model.parameters())),
    }
    if int(os.environ.get("RANK", "0")) == 0:
        Path(out).write_text(json.dumps(result, indent=0) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:3])
