"""The course's loop with Accelerate: MRPC, prepared objects, metrics gathered, the model saved; `accelerate launch` starts it."""

import evaluate
import torch
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_scheduler,
)

from accelerate import Accelerator
from accelerate.utils import set_seed

checkpoint = "bert-base-uncased"


def main():
    set_seed(42)
    accelerator = Accelerator()
    raw_datasets = load_dataset("glue", "mrpc")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def tokenize(example):
        return tokenizer(example["sentence1"], example["sentence2"], truncation=True)

    with accelerator.main_process_first():
        tokenized = raw_datasets.map(
            tokenize, batched=True, remove_columns=["sentence1", "sentence2", "idx"]
        )
    tokenized = tokenized.rename_column("label", "labels").with_format("torch")
    collate = DataCollatorWithPadding(tokenizer=tokenizer)
    train_dataloader = DataLoader(
        tokenized["train"], shuffle=True, batch_size=8, collate_fn=collate
    )
    eval_dataloader = DataLoader(
        tokenized["validation"], batch_size=8, collate_fn=collate
    )

    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    train_dl, eval_dl, model, optimizer = accelerator.prepare(
        train_dataloader, eval_dataloader, model, optimizer
    )
    num_epochs = 2
    num_training_steps = num_epochs * len(train_dl)
    lr_scheduler = get_scheduler(
        "linear",
        optimizer=optimizer,
        num_warmup_steps=0,
        num_training_steps=num_training_steps,
    )
    metric = evaluate.load("glue", "mrpc")

    progress_bar = tqdm(
        range(num_training_steps), disable=not accelerator.is_local_main_process
    )
    for epoch in range(num_epochs):
        model.train()
        total_loss = 0.0
        for batch in train_dl:
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            progress_bar.update(1)
        model.eval()
        for batch in eval_dl:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics(
                (predictions, batch["labels"])
            )
            metric.add_batch(predictions=predictions, references=references)
        accelerator.print(f"epoch {epoch}:", metric.compute(), "steps", len(train_dl))
        accelerator.print(
            "mean loss", accelerator.reduce(total_loss, "mean").item() / len(train_dl)
        )

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        "saved",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
    )
    accelerator.wait_for_everyone()
    reloaded = AutoModelForSequenceClassification.from_pretrained("saved")
    accelerator.print(
        "saved", sum(p.double().abs().sum().item() for p in reloaded.parameters())
    )


if __name__ == "__main__":
    main()
