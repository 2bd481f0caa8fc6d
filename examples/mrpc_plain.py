"""Fine-tune a BERT to tell paraphrases (MRPC), in plain PyTorch on one device. Compare with mrpc.py.

python examples/mrpc_plain.py --data path/to/mrpc
"""

from __future__ import annotations

import torch
from mrpc_parts import (
    evaluate_pairs,
    format_scores,
    load_model_and_loaders,
    read_arguments,
)


def main() -> None:
    """Train, and report accuracy and F1 on the test pairs after each epoch."""
    args = read_arguments()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model, train, test = load_model_and_loaders(args)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / (args.epochs * len(train) + 1)
    )

    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in train:
            batch = {name: value.to(device) for name, value in batch.items()}
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            schedule.step()
        scores = evaluate_pairs(model, test, device)
        print(format_scores(epoch, scores))


if __name__ == "__main__":
    main()
