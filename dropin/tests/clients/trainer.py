"""transformers' Trainer: train, evaluate, predict, checkpoint, resume. Usage: trainer.py FOLDER OUT.json"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_count", "step")


def data(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 100, (size, 12), generator=generator)
    y = x.sum(1) % 2
    mask = torch.ones(12, dtype=torch.long)
    return [{"input_ids": x[i], "attention_mask": mask, "labels": y[i]} for i in range(size)]


def model():
    set_seed(3)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return BertForSequenceClassification(config)


def metrics(found):
    right = found.predictions.argmax(-1) == found.label_ids
    return {"accuracy": float(right.mean()), "count": len(found.label_ids)}


def trainer(folder):
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=2,
        logging_steps=1,
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=5,
        eval_strategy="epoch",
        report_to=[],
        use_cpu=True,
        seed=7,
        disable_tqdm=True,
        gradient_accumulation_steps=2,
        warmup_steps=2,
        lr_scheduler_type="cosine",
    )
    return Trainer(
        model=model(), args=args, train_dataset=data(37, 0), eval_dataset=data(21, 1), compute_metrics=metrics
    )


def history(one):
    return [{key: value for key, value in row.items() if key in KEPT} for row in one.state.log_history]


def main(folder, out):
    first = trainer(folder)
    first.train()
    predicted = first.predict(data(21, 1))
    again = trainer(folder)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-5"))
    result = {
        "log": history(first),
        "predictions": predicted.predictions.tolist(),
        "test": {key: value for key, value in predicted.metrics.items() if key in ("test_loss", "test_accuracy")},
        "resumed": history(again),
        "weights": float(sum(p.double().abs().sum() for p in again.model.parameters())),
    }
    if int(os.environ.get("RANK", "0")) == 0:
        Path(out).write_text(json.dumps(result, indent=0) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:3])
