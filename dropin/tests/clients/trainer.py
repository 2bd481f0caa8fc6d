"""transformers' Trainer: train, evaluate, predict, checkpoint, resume. Usage: trainer.py FOLDER OUT.json"""

from pathlib import Path

import torch
from outcome import SHORT, TINY, history, record, weights
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

LOG_KEYS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "eval_loss",
    "eval_accuracy",
    "eval_count",
    "step",
)


def data(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 100, (size, 12), generator=generator)
    y = x.sum(1) % 2
    mask = torch.ones(12, dtype=torch.long)
    return [
        {"input_ids": x[i], "attention_mask": mask, "labels": y[i]} for i in range(size)
    ]


def model():
    set_seed(3)
    return BertForSequenceClassification(BertConfig(**TINY))


def metrics(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "count": len(prediction.label_ids)}


def trainer(folder):
    args = TrainingArguments(
        folder,
        per_device_eval_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=5,
        eval_strategy="epoch",
        gradient_accumulation_steps=2,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        **SHORT,
    )
    return Trainer(
        model=model(),
        args=args,
        train_dataset=data(37, 0),
        eval_dataset=data(21, 1),
        compute_metrics=metrics,
    )


def main(folder):
    first = trainer(folder)
    first.train()
    predicted = first.predict(data(21, 1))
    resumed_trainer = trainer(folder)
    resumed_trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-5"))
    return {
        "log": history(first, *LOG_KEYS),
        "predictions": predicted.predictions.tolist(),
        "test": {
            key: value
            for key, value in predicted.metrics.items()
            if key in ("test_loss", "test_accuracy")
        },
        "resumed": history(resumed_trainer, *LOG_KEYS),
        "weights": weights(resumed_trainer.model.parameters()),
    }


if __name__ == "__main__":
    record(main)
