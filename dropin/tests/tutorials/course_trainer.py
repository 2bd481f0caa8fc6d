"""Fine-tuning with Trainer, compute_metrics and predict, as the course has it."""

import evaluate
import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

checkpoint = "bert-base-uncased"


def compute_metrics(eval_preds):
    metric = evaluate.load("glue", "mrpc")
    logits, labels = eval_preds
    predictions = np.argmax(logits, axis=-1)
    return metric.compute(predictions=predictions, references=labels)


def main():
    set_seed(42)
    raw_datasets = load_dataset("glue", "mrpc")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def tokenize(example):
        return tokenizer(example["sentence1"], example["sentence2"], truncation=True)

    tokenized_datasets = raw_datasets.map(tokenize, batched=True)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
    training_args = TrainingArguments(
        "test-trainer",
        eval_strategy="epoch",
        num_train_epochs=2,
        logging_steps=2,
        learning_rate=3e-3,
    )
    trainer = Trainer(
        model,
        training_args,
        train_dataset=tokenized_datasets["train"],
        eval_dataset=tokenized_datasets["validation"],
        data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    predictions = trainer.predict(tokenized_datasets["validation"])
    preds = np.argmax(predictions.predictions, axis=-1)
    if trainer.is_world_process_zero():
        print(predictions.predictions.shape, predictions.label_ids.shape)
        print(predictions.metrics)
        metric = evaluate.load("glue", "mrpc")
        print(metric.compute(predictions=preds, references=predictions.label_ids))
        print([round(float(value), 6) for value in predictions.predictions.flatten()])


if __name__ == "__main__":
    main()
