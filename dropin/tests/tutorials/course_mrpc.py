"""The training loop of a well-known course: MRPC with a prepared model, loaders and schedule, started by the launcher."""

import torch
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, get_scheduler

from accelerate import Accelerator

checkpoint = "bert-base-uncased"


def main():
    accelerator = Accelerator()
    raw_datasets = load_dataset("glue", "mrpc")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def tokenize(example):
        return tokenizer(example["sentence1"], example["sentence2"], truncation=True)

    with accelerator.main_process_first():
        tokenized = raw_datasets.map(tokenize, batched=True)
    tokenized = tokenized.remove_columns(["sentence1", "sentence2", "idx"])
    tokenized = tokenized.rename_column("label", "labels")
    tokenized.set_format("torch")
    collate = DataCollatorWithPadding(tokenizer=tokenizer)
    train_dataloader = DataLoader(tokenized["train"], shuffle=True, batch_size=8, collate_fn=collate)
    eval_dataloader = DataLoader(tokenized["validation"], batch_size=8, collate_fn=collate)

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    train_dl, eval_dl, model, optimizer = accelerator.prepare(train_dataloader, eval_dataloader, model, optimizer)
    num_epochs = 2
    num_training_steps = num_epochs * len(train_dl)
    lr_scheduler = get_scheduler(
        "linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=num_training_steps
    )

    progress_bar = tqdm(range(num_training_steps), disable=not accelerator.is_local_main_process)
    for _epoch in range(num_epochs):
        model.train()
        for batch in train_dl:
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            progress_bar.update(1)
        model.eval()
        right = count = 0
        for batch in eval_dl:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += (predictions == labels).sum().item()
            count += len(labels)
        accelerator.print("accuracy", right / count, "of", count)
    assert count == len(tokenized["validation"])
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained("saved", is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    accelerator.wait_for_everyone()
    AutoModelForSequenceClassification.from_pretrained("saved")
    accelerator.print("done")


if __name__ == "__main__":
    main()
