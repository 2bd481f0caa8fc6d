"""Fine-tune a BERT to tell paraphrases (MRPC), on any number of processes. Compare with mrpc_plain.py.

python examples/mrpc.py --data path/to/mrpc
hasten launch --num_processes 2 examples/mrpc.py --data path/to/mrpc
"""

from __future__ import annotations

import torch
from mrpc_parts import (
    evaluate_pairs,
    format_scores,
    load_model_and_loaders,
    read_arguments,
)

from hasten import Accelerator


def main() -> None:
    """Train, and report accuracy and F1 on the test pairs after each epoch."""
    args = read_arguments()
    torch.manual_seed(args.seed)
    # 1 of 3: instead of choosing a device
    accelerator = Accelerator(log_with="jsonl", project_dir=args.out)

    model, train, test = load_model_and_loaders(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / (args.epochs * len(train) + 1)
    )
    # 2 of 3: instead of moving the model and every batch
    model, train, test, optimizer, schedule = accelerator.prepare(
        model, train, test, optimizer, schedule
    )

    accelerator.init_trackers("mrpc", config=vars(args))
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in (bar := accelerator.progress(train, desc=f"epoch {epoch}")):
            optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)  # 3 of 3: instead of loss.backward()
            optimizer.step()
            schedule.step()
            bar.show(loss=loss)
            accelerator.log({"loss": loss})
        scores = evaluate_pairs(
            model, test, accelerator.device, accelerator.gather_for_metrics
        )
        accelerator.log({"accuracy": scores.accuracy, "f1": scores.f1})
        accelerator.print(format_scores(epoch, scores))
    accelerator.end_training()


if __name__ == "__main__":
    main()
