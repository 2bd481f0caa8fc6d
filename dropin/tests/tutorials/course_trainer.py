"""Fine-tuning with Trainer, compute_metrics and predict, as the course has it."""

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

checkpoint = "bert-base-uncased"


def compute_metrics(eval_preds):
    logits, labels = eval_preds
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def main():
    raw_datasets = load_dataset("glue", "mrpc")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenized = raw_datasets.map(lambda e: tokenizer(e["sentence1"], e["sentence2"], truncation=True), batched=True)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
    trainer = Trainer(
        model,
        TrainingArguments("test-trainer", eval_strategy="epoch", num_train_epochs=1, report_to=[], use_cpu=True),
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    predictions = trainer.predict(tokenized["validation"])
    assert predictions.predictions.shape == (len(tokenized["validation"]), 2)
    assert "test_accuracy" in predictions.metrics
    print("done")


if __name__ == "__main__":
    main()
