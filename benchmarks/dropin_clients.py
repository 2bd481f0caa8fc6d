"""transformers on the drop-in beside the original package: Trainer, and device_map="auto" with too little memory.

    python benchmarks/dropin_clients.py                       # on the GPU if there is one; the original is installed here
    python benchmarks/dropin_clients.py --original FOLDER     # or unpacked: pip install --target FOLDER
    python benchmarks/dropin_clients.py --quick               # tiny models and fewer steps

Each package runs in a process of its own, in an environment in which the other is not installed (either_package.py says
how). The two processes take turns: while one computes a few steps, the other waits. Models have random weights of one seed, so nothing is downloaded. Trainer trains GPT-2 and BERT with dropout, in
float32 and bf16: every step's loss is compared. A GPT-2 is loaded with device_map="auto" and a max_memory of half of its
weights, so that the rest is streamed from host memory (without a GPU: from disk): device map, logits and generated tokens
are compared. Kernels are the deterministic ones, because the order of a sum would otherwise be the GPU's choice.

Ends with an error when the numbers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from either_package import PACKAGES, build_environment, contender_command

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}
SEED, VOCABULARY = 11, 1000
DONE = "a turn is done\n"  # what a process prints before it waits
STEPS_A_TURN = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--original",
        type=Path,
        help="folder with the original package, where it is not installed",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models and fewer steps"
    )
    parser.add_argument(
        "--steps", type=int, default=30, help="updates of each training"
    )
    parser.add_argument("--cpu", action="store_true", help="leave the GPU alone")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        run_tasks(args)
        return
    from loading import installed_versions
    from recording import record_run

    device = "cpu" if args.cpu else _choose_device()
    with tempfile.TemporaryDirectory() as folder:
        reports = in_turns(args, Path(folder))
    rows = compare_reports(reports)
    platform_versions = {
        **installed_versions(device),
        "transformers": metadata.version("transformers"),
    }
    platform_versions["accelerate"] = " and ".join(
        reports[package]["version"] for package in PACKAGES
    )
    record_run(
        "dropin_clients",
        device,
        {"rows": rows, "found": reports},
        format_page(platform_versions, rows),
        platform_versions,
    )
    if not all(row["equal"] == "yes" for row in rows):
        sys.exit("the drop-in's numbers differ from the original's")


def in_turns(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """What the clients did in two processes, one for each package, of which one computes at a time."""
    running = {
        package: start_contender(package, args, folder / package)
        for package in PACKAGES
    }
    try:
        while running:
            for package, child in list(running.items()):
                output, turns = child.stdout, child.stdin
                assert output is not None
                assert turns is not None
                turns.write("your turn\n")
                turns.flush()
                for line in iter(output.readline, ""):
                    if line == DONE:
                        break
                    print(f"{package}: {line}", end="", flush=True)
                else:
                    del running[package]
                    if child.wait():
                        sys.exit(
                            f"the clients of the {package} package ended with exit code {child.returncode}"
                        )
    finally:
        for child in running.values():
            child.kill()
    return {
        package: json.loads((folder / package / "found.json").read_text())
        for package in PACKAGES
    }


def start_contender(
    package: str, args: argparse.Namespace, folder: Path
) -> subprocess.Popen[str]:
    """A process that finds this package, and waits for its first turn."""
    site_folder = build_environment(package, folder / "site", args.original)
    options = ["--inside", str(folder), "--steps", str(args.steps)]
    options += [
        flag
        for flag, is_given in (("--quick", args.quick), ("--cpu", args.cpu))
        if is_given
    ]
    words, variables = contender_command(site_folder, __file__, *options)
    # or matrix products on a GPU are not repeatable
    variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # tiny models; threads that wait for each other would be measured
    variables.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.Popen(
        words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def compare_reports(reports: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for every task: the largest difference, and both times."""
    original_tasks, dropin_tasks = (reports[package]["tasks"] for package in PACKAGES)
    rows = []
    for name, task in original_tasks.items():
        dropin_task = dropin_tasks[name]
        has_equal_fields = all(
            task[key] == dropin_task[key]
            for key in task
            if key not in ("numbers", "ms", "parts")
        )
        pairs = (
            list(zip(task["numbers"], dropin_task["numbers"], strict=True))
            if has_equal_fields
            else []
        )
        largest_difference = max((abs(a - b) for a, b in pairs), default=float("inf"))
        equal = (
            has_equal_fields
            and largest_difference <= TOLERANCE[name.rpartition(" ")[2]]
        )
        row = {
            "task": name,
            "compared": task["parts"],
            "largest difference": largest_difference,
            "equal": "yes" if equal else "NO",
        }
        rows.append(
            row
            | {
                "original (ms)": task["ms"],
                "drop-in (ms)": dropin_task["ms"],
                "ratio": dropin_task["ms"] / task["ms"],
            }
        )
    return rows


def format_page(platform_versions: dict[str, str], rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = ["# transformers on the drop-in, beside the original", ""]
    lines += [
        ", ".join(f"{key} {value}" for key, value in platform_versions.items()),
        "",
    ]
    lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    for row in rows:
        cells = [
            f"{value:.4g}" if isinstance(value, float) else str(value)
            for value in row.values()
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# -- inside of one package's process ------------------------------------------------------------------------------
def run_tasks(args: argparse.Namespace) -> None:
    """Run every task and leave the numbers in found.json."""
    import torch

    import accelerate

    sys.stdin.readline()
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = "cpu" if args.cpu else _choose_device()
    small = args.quick or device == "cpu"
    tasks: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        for name, make in (("GPT-2", build_gpt2), ("BERT", build_bert)):
            label = f"Trainer, {name}, {args.steps} steps, {precision}"
            tasks[label] = train_model(make(small), args, precision == "bf16", small)
            print(
                f"{label}: {tasks[label]['numbers'][-1]:.6f}, {tasks[label]['ms']:.1f} ms a step",
                flush=True,
            )
    tasks |= measure_placed_model(args.inside, device, small)
    report = {"version": accelerate.__version__, "tasks": tasks}
    (args.inside / "found.json").write_text(json.dumps(report))


def next_turn(device: str) -> None:
    """Finish what the GPU was given, let the other package compute, and wait for the next turn."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    print(DONE, end="", flush=True)
    sys.stdin.readline()


def build_gpt2(small: bool, **options: Any) -> Any:
    """A GPT-2 with random weights."""
    import transformers

    transformers.set_seed(SEED)
    width, layers = (64, 2) if small else (768, 12)
    sizes = {
        "n_embd": width,
        "n_layer": layers,
        "n_head": max(width // 64, 2),
        "n_positions": 128,
    }
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes, **options
        )
    )


def build_bert(small: bool) -> Any:
    """A BERT classifier with random weights."""
    import transformers

    transformers.set_seed(SEED)
    width, layers = (64, 2) if small else (768, 12)
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(width // 64, 2),
    }
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, intermediate_size=4 * width, num_labels=2, **sizes
    )
    return transformers.BertForSequenceClassification(config)


def train_model(
    model: Any, args: argparse.Namespace, bf16: bool, small: bool
) -> dict[str, Any]:
    """The loss and gradient norm of every step, and the median time of a step."""
    import torch
    import transformers

    gaps: list[float] = []
    device = "cpu" if args.cpu else _choose_device()

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        last: float | None = None

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            if self.last is not None:
                gaps.append(time.perf_counter() - self.last)
            if state.global_step % STEPS_A_TURN == 0:
                next_turn(device)
            self.last = (
                None if state.global_step % STEPS_A_TURN == 0 else time.perf_counter()
            )

    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder, max_steps=args.steps, per_device_train_batch_size=4 if small else 16, learning_rate=1e-4, bf16=bf16,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=SEED, use_cpu=device == "cpu",
            gradient_accumulation_steps=2, warmup_steps=3, dataloader_pin_memory=device == "cuda",
        )  # fmt: skip
        rows = draw_sequences(model, 16 if small else 64)
        trainer = transformers.Trainer(
            model=model, args=options, train_dataset=rows, callbacks=[Clock()]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    numbers = [float(row[key]) for row in logged for key in ("loss", "grad_norm")]
    return {
        "numbers": numbers,
        "parts": "losses, gradient norms",
        "ms": statistics.median(gaps[4:]) * 1e3,
    }


def draw_sequences(model: Any, length: int) -> list[dict[str, Any]]:
    """Rows of random tokens; a GPT-2 learns them, a BERT the parity of their sum."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(1, VOCABULARY, (512, length), generator=generator)
    classes = getattr(model.config, "model_type", "") == "bert"
    return [
        {"input_ids": row, "labels": row.sum() % 2 if classes else row}
        for row in tokens
    ]


def measure_placed_model(folder: Path, device: str, small: bool) -> dict[str, Any]:
    """Logits and tokens of a GPT-2 that fits by half, in float32 and in bf16."""
    import torch
    import transformers

    tasks = {}
    model = build_gpt2(small)
    model.generation_config.pad_token_id = 0
    model_bytes = sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters()
    )
    model.save_pretrained(folder / "model")
    del model
    prompt = torch.randint(
        1, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(SEED)
    )
    for dtype, precision in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        room = model_bytes * dtype.itemsize // 4 // 2
        limits: dict[Any, Any] = (
            {0: room, "cpu": 4 * model_bytes} if device == "cuda" else {"cpu": room}
        )
        loaded = transformers.GPT2LMHeadModel.from_pretrained(
            folder / "model",
            device_map="auto",
            max_memory=limits,
            dtype=dtype,
            offload_folder=str(folder / precision),
        ).eval()
        device_map = {
            name: str(location) for name, location in loaded.hf_device_map.items()
        }
        inputs = prompt.to("cuda" if device == "cuda" else "cpu")
        options = {
            "attention_mask": torch.ones_like(inputs),
            "max_new_tokens": 12,
            "do_sample": False,
        }
        with torch.no_grad():
            logits = (
                loaded(inputs).logits.float().flatten()[:: 7 if small else 97].tolist()
            )
            forward = _time_turns(partial(loaded, inputs), device)
            words = loaded.generate(inputs, **options).tolist()
            tokens = _time_turns(partial(loaded.generate, inputs, **options), device)
        common = {"map": device_map, "tokens": words, "numbers": logits}
        tasks[f'device_map="auto", forward, {precision}'] = {
            **common,
            "parts": "map, logits",
            "ms": forward,
        }
        tasks[f'device_map="auto", 12 tokens, {precision}'] = {
            **common,
            "parts": "map, tokens",
            "ms": tokens,
        }
        print(
            f"device_map, {precision}: {forward:.1f} ms a forward, on {sorted(set(device_map.values()))}",
            flush=True,
        )
        del loaded
    return tasks


def _time_turns(run: Callable[[], Any], device: str) -> float:
    import torch

    times = []
    for _ in range(6):
        next_turn(device)
        start_time = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start_time) * 1e3)
    return statistics.median(times[1:])


def _choose_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
