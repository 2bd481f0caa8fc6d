"""Fine-tune a BERT to tell paraphrases (MRPC) with the Trainer, without a loop. Compare with mrpc.py.

python examples/mrpc_trainer.py --data path/to/mrpc
hasten launch --num_processes 2 examples/mrpc_trainer.py --data path/to/mrpc
hasten report runs/mrpc -o report.html
"""

from __future__ import annotations

import torch
from mrpc_parts import Pair, model_folder, read_arguments, read_pairs
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hasten import Trainer, TrainingArguments
from hasten.trainer import EvalPrediction


def compute_scores(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy and F1 of the pairs that say the same."""
    answers, truths = prediction.predictions.argmax(-1), prediction.label_ids
    hits = int(((answers == 1) & (truths == 1)).sum())
    return {
        "accuracy": float((answers == truths).mean()),
        "f1": 2 * hits / max(int((answers == 1).sum() + (truths == 1).sum()), 1),
    }


def main() -> None:
    """Train, evaluate after each epoch, and end with the best model; a restarted run resumes from its newest checkpoint."""
    args = read_arguments()
    torch.manual_seed(args.seed)
    name = model_folder(args.model)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=2, dtype=torch.float32
    )

    def tokenize_pair(pair: Pair) -> dict[str, object]:
        return {
            **tokenizer(pair.first, pair.second, truncation=True, max_length=128),
            "label": pair.label,
        }

    train, test = (
        [tokenize_pair(p) for p in read_pairs(args.data, split)[: args.limit]]
        for split in ("train", "test")
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            str(args.out),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=64,
            learning_rate=args.lr,
            weight_decay=0.01,
            seed=args.seed,
            logging_steps=10,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="f1",
            run_name="mrpc",
        ),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,  # pads each batch to its longest pair
        compute_metrics=compute_scores,
    )
    trainer.train(resume_from_checkpoint="auto")
    metrics = trainer.evaluate()
    trainer.accelerator.print(
        f"best model: accuracy {metrics['eval_accuracy']:.4f}, F1 {metrics['eval_f1']:.4f} on {len(test)} test pairs"
    )
    trainer.save_model()


if __name__ == "__main__":
    main()
