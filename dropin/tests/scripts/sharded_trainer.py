"""transformers' Trainer, sharded where there are two processes. Usage: sharded_trainer.py FOLDER"""

import json
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

LOG_KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss", "step")
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def data(size, seed):
    x = torch.randint(0, 50, (size, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in x]


def model(kind):
    set_seed(3)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, max_position_embeddings=16, **sizes)
    )
    if kind == "whole":
        return llama
    from peft import LoraConfig, get_peft_model

    set_seed(5)
    return get_peft_model(
        llama, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    )


def trainer(folder, kind, form):
    options = {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": form,
    }
    sharding = (
        {"fsdp": "full_shard auto_wrap", "fsdp_config": options} if RANKS > 1 else {}
    )
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8 // RANKS,
        per_device_eval_batch_size=8 // RANKS,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        max_grad_norm=0.5,
        report_to=[],
        use_cpu=True,
        seed=7,
        disable_tqdm=True,
        **sharding,
    )
    return Trainer(
        model=model(kind),
        args=args,
        train_dataset=data(32, 0),
        eval_dataset=data(16, 1),
    )


def history(trained_trainer):
    return [
        {key: value for key, value in row.items() if key in LOG_KEYS}
        for row in trained_trainer.state.log_history
    ]


def run(folder, kind, form):
    first = trainer(folder, kind, form)
    first.train()
    resumed_trainer = trainer(folder, kind, form)
    resumed_trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    if RANKS > 1:
        resumed_trainer.accelerator.state.fsdp_plugin.set_state_dict_type(
            "FULL_STATE_DICT"
        )
    resumed_trainer.save_model(str(folder / "exported"))
    blocks = sum(
        isinstance(module, FSDPModule) for module in resumed_trainer.model.modules()
    )
    return {
        "blocks": blocks,
        "first": history(first),
        "resumed": history(resumed_trainer),
    }


def main(folder):
    histories = {"whole": run(folder / "whole", "whole", "FULL_STATE_DICT")}
    if find_spec("peft"):
        histories["lora"] = run(folder / "lora", "lora", "SHARDED_STATE_DICT")
    if int(os.environ.get("RANK", "0")) == 0:
        (folder / "found.json").write_text(json.dumps(histories))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
