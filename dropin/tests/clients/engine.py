"""transformers' Trainer with and without DeepSpeed: the losses of both. Usage: engine.py FOLDER OUT.json"""

from outcome import SHORT, history, record
from trainer import data, model
from transformers import Trainer, TrainingArguments

OWN = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
MADE = {
    **OWN,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
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


def losses(folder, config):
    args = TrainingArguments(
        folder,
        num_train_epochs=1,
        learning_rate=1e-3,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        save_strategy="no",
        deepspeed=config,
        optim="adamw_torch",
        **SHORT,
    )
    trainer = Trainer(model=model(), args=args, train_dataset=data(37, 0))
    trainer.train()
    return history(trainer, "loss", "grad_norm", "learning_rate", "step")


def main(folder):
    from accelerate.state import AcceleratorState

    found = {}
    for name, config in (("without", None), ("own", OWN), ("made", MADE)):
        AcceleratorState._reset_state(True)
        found[name] = losses(folder, config)
    return found


if __name__ == "__main__":
    record(main)
