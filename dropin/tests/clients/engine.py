"""transformers' Trainer with and without DeepSpeed, whole and resumed: the losses of all. Usage: engine.py FOLDER OUT.json"""

import copy
import os

from outcome import SHORT, history, record
from trainer import data, model
from transformers import BertForSequenceClassification, Trainer, TrainingArguments

from accelerate.state import AcceleratorState

SCRIPT_OPTIMIZER = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
PARTITIONED = {
    **SCRIPT_OPTIMIZER,
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "reduce_bucket_size": "auto",
    },
}
CONFIG_OPTIMIZER = {
    **SCRIPT_OPTIMIZER,
    "zero_optimization": {"stage": 3},
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": "auto",
            "betas": "auto",
            "eps": "auto",
            "weight_decay": "auto",
        },
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


def loaded(folder):
    """The same model read from files, which transformers partitions while it builds under ZeRO 3."""
    read = BertForSequenceClassification.from_pretrained(folder)
    assert all(parameter.numel() == 0 for parameter in read.parameters())
    return read


def losses(folder, config, build):
    """The log of a training, and of one that resumes from its checkpoint after three updates."""
    logs = []
    for start in (None, os.path.join(folder, "checkpoint-3")):
        AcceleratorState._reset_state(True)
        args = TrainingArguments(
            folder if start is None else f"{folder}-resumed",
            num_train_epochs=2,
            learning_rate=1e-3,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            save_strategy="no" if start else "steps",
            save_steps=3,
            deepspeed=copy.deepcopy(config),
            optim="adamw_torch",
            **SHORT,
        )
        trainer = Trainer(model=build(), args=args, train_dataset=data(37, 0))
        trainer.train(resume_from_checkpoint=start)
        logs.append(history(trainer, "loss", "grad_norm", "learning_rate", "step"))
    return {"whole": logs[0], "resumed": logs[1]}


def main(folder):
    losses_by_name = {}
    weights = os.path.join(folder, f"weights-{os.environ.get('RANK', '0')}")
    model().save_pretrained(weights)
    for name, config, build in (
        ("without", None, model),
        ("own", SCRIPT_OPTIMIZER, model),
        ("made", CONFIG_OPTIMIZER, model),
        ("partitioned", PARTITIONED, lambda: loaded(weights)),
    ):
        losses_by_name[name] = losses(os.path.join(folder, name), config, build)
    return losses_by_name


if __name__ == "__main__":
    record(main)
