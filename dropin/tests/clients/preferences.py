"""trl's trainers beside SFT for a few steps: DPO, KTO, Reward, GRPO, RLOO. Usage: preferences.py FOLDER OUT.json [name …]"""

import os
import random
import sys
import time
import traceback
from pathlib import Path

from datasets import Dataset
from outcome import SHORT, history, record, weights
from sft import tokenizer
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    set_seed,
)

SIZES = {
    "vocab_size": 64,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
LOG_KEYS = ("loss", "grad_norm", "learning_rate", "rewards/chosen", "rewards/rejected", "rewards/margins", "reward", "reward_std", "kl", "margin", "accuracy")  # fmt: skip
COMMON = {
    **SHORT,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
}


def lines(count, longest=8, seed=0):
    chance = random.Random(seed)
    return [
        " ".join(f"w{chance.randrange(60)}" for _ in range(chance.randint(3, longest)))
        for _ in range(count)
    ]


def pairs():
    rows = zip(lines(16), lines(16, seed=1), lines(16, seed=2), strict=True)
    return Dataset.from_list(
        [
            {"prompt": prompt, "chosen": f" {a}", "rejected": f" {b}"}
            for prompt, a, b in rows
        ]
    )


def writer(folder):
    """A model that has a place of its own on the disk, from where trainers load its reference."""
    set_seed(3)
    model_folder, done = f"{folder}-model", Path(f"{folder}-saved")
    model = GPT2LMHeadModel(GPT2Config(**SIZES))
    # transformers writes weights on the first rank only
    if os.environ.get("RANK", "0") == "0":
        model.save_pretrained(model_folder)
        done.touch()
    while not done.exists():
        time.sleep(0.1)
    return GPT2LMHeadModel.from_pretrained(model_folder)


def trained(trainer):
    trainer.train()
    return {
        "log": history(trainer, *LOG_KEYS),
        "weights": weights(trainer.model.parameters()),
    }


def dpo(folder):
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(folder, max_length=32, **COMMON)
    return trained(
        DPOTrainer(
            model=writer(folder),
            args=args,
            train_dataset=pairs(),
            processing_class=tokenizer(),
        )
    )


def kto(folder):
    from trl.experimental.kto import KTOConfig, KTOTrainer

    rows = zip(lines(16), lines(16, seed=1), strict=True)
    data = Dataset.from_list(
        [
            {"prompt": prompt, "completion": f" {completion}", "label": index % 2 == 0}
            for index, (prompt, completion) in enumerate(rows)
        ]
    )
    args = KTOConfig(folder, max_length=32, **COMMON)
    return trained(
        KTOTrainer(
            model=writer(folder),
            args=args,
            train_dataset=data,
            processing_class=tokenizer(),
        )
    )


def reward(folder):
    from trl import RewardConfig, RewardTrainer

    set_seed(3)
    words = tokenizer()
    model = GPT2ForSequenceClassification(
        GPT2Config(num_labels=1, pad_token_id=words.pad_token_id, **SIZES)
    )
    args = RewardConfig(folder, max_length=32, **COMMON)
    return trained(
        RewardTrainer(
            model=model, args=args, train_dataset=pairs(), processing_class=words
        )
    )


def length(completions, **kwargs):
    return [float(len(completion.split())) for completion in completions]


def online(kind, settings):
    def run(folder):
        import trl

        args = getattr(trl, settings)(
            folder,
            num_generations=2,
            max_completion_length=6,
            temperature=1.0,
            **COMMON,
        )
        data = Dataset.from_list([{"prompt": prompt} for prompt in lines(16)])
        online_trainer = getattr(trl, kind)(
            model=writer(folder),
            reward_funcs=length,
            args=args,
            train_dataset=data,
            processing_class=tokenizer(),
        )
        return trained(online_trainer)

    return run


METHODS = {
    "dpo": dpo,
    "kto": kto,
    "reward": reward,
    "grpo": online("GRPOTrainer", "GRPOConfig"),
    "rloo": online("RLOOTrainer", "RLOOConfig"),
}


def main(folder):
    results = {}
    for name in sys.argv[3:] or METHODS:
        try:
            results[name] = METHODS[name](str(Path(folder) / name))
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    return results


if __name__ == "__main__":
    record(main)
