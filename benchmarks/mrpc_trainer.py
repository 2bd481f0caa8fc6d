"""MRPC through `hasten.Trainer`: scores of several seeds, and the losses of three forms of the same training compared.

    python benchmarks/mrpc_pack.py path/to/mrpc runs/mrpc_pack
    PYTHONPATH=runs/mrpc_pack/site python benchmarks/mrpc_trainer.py --data runs/mrpc_pack/data --model runs/mrpc_pack/model

Scores: every seed is one run of examples/mrpc_trainer.py as it is, judged by its last epoch, not by the best one.
Losses: a loop on the Accelerator, `hasten.Trainer` and transformers' `Trainer` (on whichever `accelerate` is installed) train
from the same weights on the same rows in the same order, with dropout; every step's loss is compared. Each form seeds the
random numbers of a step by its number, because a CPU also draws from them for other purposes, and kernels are the
deterministic ones, because the order of a sum would otherwise be the GPU's choice.

Ends with an error when a seed stays below the target or two forms differ by more than the tolerance.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from mrpc_seeds import mrpc_options
from recording import record
from torch.utils.data import DataLoader, SequentialSampler

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import transformers  # noqa: E402
from mrpc_parts import model_folder, read_pairs  # noqa: E402

import hasten  # noqa: E402
import hasten.trainer  # noqa: E402

ACCURACY, F1, TOLERANCE = 0.79, 0.85, 1e-5
RATE, DECAY, BATCH = 1e-4, 0.01, 16
LOOP, OURS, THEIRS = "loop on the Accelerator", "hasten.Trainer", "transformers' Trainer"
Rows = list[dict[str, Any]]


def main() -> None:
    """Run both parts and write mrpc_trainer_DEVICE.json and .md."""
    parser = mrpc_options(__doc__)
    parser.add_argument("--limit", type=int, help="use only this many pairs of each part, for a quick look")
    parser.add_argument("--only", choices=("scores", "losses"), help="one part alone")
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or matrix products on a GPU are not repeatable
    scores = [] if args.only == "losses" else [score(args, seed) for seed in args.seeds]
    losses = [] if args.only == "scores" else [compare(args, seed) for seed in args.seeds]
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "accelerate")},
        "epochs": args.epochs, "limit": args.limit, "target": {"accuracy": ACCURACY, "f1": F1},
        "reached": all(row["accuracy"] >= ACCURACY and row["f1"] >= F1 for row in scores),
        "scores": scores, "tolerance": TOLERANCE,
        "equal": all(row["largest"] <= TOLERANCE for row in losses), "losses": losses,
    }  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record("mrpc_trainer", device, result, page(result), folder=args.out)
    if not (result["reached"] and result["equal"]):
        sys.exit(f"below accuracy {ACCURACY} or F1 {F1}, or losses more than {TOLERANCE} apart")


# -- scores -------------------------------------------------------------------------------------------------------
def score(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run of the example: its scores after each epoch, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXAMPLES / "mrpc_trainer.py"), "--data", args.data, "--model", args.model]
        command += ["--seed", str(seed), "--epochs", str(args.epochs), "--out", folder]
        command += [] if args.limit is None else ["--limit", str(args.limit)]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        (file,) = Path(folder).glob("**/metrics.jsonl")
        rows = [row for row in hasten.read_metrics(file) if "eval_f1" in row]
    epochs = [[row["eval_accuracy"], row["eval_f1"]] for row in rows[: args.epochs]]
    found = {"seed": seed, "accuracy": epochs[-1][0], "f1": epochs[-1][1], "each_epoch": epochs, "seconds": seconds}
    print(f"seed {seed}: accuracy {found['accuracy']:.4f}, F1 {found['f1']:.4f}, {seconds:.0f} s", flush=True)
    return found


# -- losses -------------------------------------------------------------------------------------------------------
def compare(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The losses of every step of the three forms with one seed, and the largest difference from the loop's."""
    name = model_folder(args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    pairs = [
        {**tokenizer(pair.first, pair.second, truncation=True, max_length=128), "label": pair.label}
        for pair in read_pairs(args.data, "train")[: args.limit]
    ]
    generator = torch.Generator().manual_seed(seed)
    # every epoch has an order of its own; laid one behind the other they are an order that each form reads as it is
    rows = [pairs[i] for _ in range(args.epochs) for i in torch.randperm(len(pairs), generator=generator).tolist()]
    collate = hasten.trainer.DataCollatorWithPadding(tokenizer)
    forms: dict[str, Callable[..., list[float]]] = {LOOP: by_loop, OURS: by_trainer, THEIRS: by_their_trainer}
    losses: dict[str, list[float]] = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    for form, train in forms.items():
        hasten.set_seed(seed)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(name, num_labels=2, dtype=torch.float32)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            losses[form] = train(model, rows, collate, seed, folder)
        print(f"seed {seed}, {form}: {len(losses[form])} steps, {time.perf_counter() - began:.0f} s", flush=True)
    torch.use_deterministic_algorithms(False)
    apart = {
        form: max(abs(a - b) for a, b in zip(losses[LOOP], found, strict=True))
        for form, found in losses.items()
        if form != LOOP
    }
    return {
        "seed": seed, "steps": len(losses[LOOP]), "first": losses[LOOP][0], "last": losses[LOOP][-1],
        "largest": max(apart.values()), "largest_of": apart, "losses": losses,
    }  # fmt: skip


def seed_step(seed: int, step: int) -> None:
    """Seed the random numbers of a step, counted from 0."""
    torch.manual_seed(1_000_003 * seed + step)


def settings(seed: int) -> dict[str, Any]:
    """The arguments both Trainers get."""
    return {
        "per_device_train_batch_size": BATCH, "num_train_epochs": 1, "learning_rate": RATE, "weight_decay": DECAY,
        "lr_scheduler_type": "linear", "optim": "adamw_torch", "max_grad_norm": 1.0, "seed": seed, "logging_steps": 50,
        "save_strategy": "no", "eval_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }  # fmt: skip


def by_loop(model: Any, rows: Rows, collate: Any, seed: int, folder: str) -> list[float]:
    """The loop a person writes on the Accelerator."""
    accelerator = hasten.Accelerator(project_dir=folder)
    loader: Any = DataLoader(rows, batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]
    decayed, rest = [[p for p in model.parameters() if (p.ndim >= 2) is big] for big in (True, False)]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer: Any = torch.optim.AdamW(groups, lr=RATE)
    schedule: Any = hasten.trainer.get_scheduler("linear", optimizer, 0, len(loader))
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    model.train()
    losses = []
    for step, batch in enumerate(loader):
        seed_step(seed, step)
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    accelerator.end_training()
    return [float(loss) for loss in losses]


def by_trainer(model: Any, rows: Rows, collate: Any, seed: int, folder: str) -> list[float]:
    """hasten's Trainer, reading the rows in their order."""
    losses: list[Any] = []

    class InOrder(hasten.Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return self._loader(self.train_dataset, BATCH)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            seed_step(seed, len(losses))
            losses.append(super().compute_loss(*args, **kwargs))
            return losses[-1]

    InOrder(model, hasten.TrainingArguments(folder, **settings(seed)), collate, train_dataset=rows).train()
    return [float(loss) for loss in losses]


def by_their_trainer(model: Any, rows: Rows, collate: Any, seed: int, folder: str) -> list[float]:
    """transformers' Trainer, reading the rows in their order."""
    losses: list[Any] = []

    class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            seed_step(seed, len(losses))
            losses.append(super().compute_loss(*args, **kwargs))
            return losses[-1]

    InOrder(model, transformers.TrainingArguments(folder, **settings(seed)), collate, train_dataset=rows).train()
    return [float(loss) for loss in losses]


# -- the page -----------------------------------------------------------------------------------------------------
def page(result: dict[str, Any]) -> str:
    """Both parts as tables."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    few = "" if result["limit"] is None else f", only {result['limit']} pairs of each part"
    lines = [
        "# MRPC with MiniLM through the Trainer",
        "",
        f"{result['device']}; {versions}; {result['epochs']} epochs{few}.",
    ]
    if result["scores"]:
        lines += ["", f"Target: accuracy {ACCURACY}, F1 {F1} after the last epoch: {word(result['reached'])}.", ""]
        lines += ["| seed | accuracy | F1 | seconds |", "|---|---|---|---|"]
        lines += [
            f"| {r['seed']} | {r['accuracy']:.4f} | {r['f1']:.4f} | {r['seconds']:.0f} |" for r in result["scores"]
        ]
    if result["losses"]:
        lines += [
            "",
            f"Losses of every step against those of the loop, at most {TOLERANCE} apart: {word(result['equal'])}.",
            "",
        ]
        lines += [f"| seed | steps | first and last loss | {OURS} | {THEIRS} |", "|---|---|---|---|---|"]
        lines += [
            f"| {r['seed']} | {r['steps']} | {r['first']:.4f}, {r['last']:.4f} | {r['largest_of'][OURS]:.1e} "
            f"| {r['largest_of'][THEIRS]:.1e} |"
            for r in result["losses"]
        ]
    return "\n".join([*lines, ""])


def word(true: bool) -> str:
    """Yes or no."""
    return "yes" if true else "**no**"


if __name__ == "__main__":
    main()
