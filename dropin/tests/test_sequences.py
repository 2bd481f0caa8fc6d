"""Sequences split over processes (`sp_size`): batches cut into parts, and training that equals one plain process.

Losses differ from plain torch by the order of float32 sums only: 1e-5 on a loss of 4.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate._impl.commands import launch
from accelerate._impl.commands.launch_variables import variables_for
from accelerate._impl.loaders.sequence_parts import SequenceSplitter
from accelerate._impl.sharding.sequences import SpannedAttention
from accelerate.utils import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    patch_environment,
)
from hasten.errors import DataError, PrepareError, StepError
from hasten.optional import available

TESTS_FOLDER = Path(__file__).parent
LOOP, TRAINER = (
    str(TESTS_FOLDER / "scripts" / "sequence_loop.py"),
    str(TESTS_FOLDER / "scripts" / "sequence_trainer.py"),
)
needs_deepspeed = pytest.mark.skipif(
    not available("deepspeed"), reason="needs deepspeed"
)
needs_transformers = pytest.mark.skipif(
    not available("transformers"), reason="needs transformers"
)


def cut(ranks: int, length: int | None = None) -> SequenceSplitter:
    """How a group of so many processes would cut; nothing is sent."""
    comm: Any = SimpleNamespace(size=ranks, rank=0)
    return SequenceSplitter(comm, length)


def batch(length: int = 12, **more: Any) -> dict[str, Any]:
    tokens = torch.arange(2 * length).view(2, length)
    return {"input_ids": tokens, "labels": tokens.clone(), **more}


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_parts_joined_are_the_batch_with_labels_one_ahead(ranks: int) -> None:
    whole_batch = batch(note="as it is")
    rank_batches = cut(ranks).parts(whole_batch)
    assert len(rank_batches) == ranks
    joined = {
        key: torch.cat([rank_batch[key] for rank_batch in rank_batches], 1)
        for key in rank_batches[0]
        if key != "note"
    }
    assert torch.equal(joined["input_ids"], whole_batch["input_ids"])
    assert torch.equal(joined["position_ids"], torch.arange(12).expand(2, -1))
    assert torch.equal(joined["shift_labels"][:, :-1], whole_batch["labels"][:, 1:])
    assert joined["shift_labels"][:, -1].tolist() == [-100, -100]
    assert torch.equal(joined["labels"], joined["shift_labels"]), (
        "or models would compute no loss"
    )
    assert {rank_batch["note"] for rank_batch in rank_batches} == {"as it is"}
    assert all(
        rank_batch["shift_labels"].is_contiguous() for rank_batch in rank_batches
    ), "scripts take views of them"
    assert set(whole_batch) == {"input_ids", "labels", "note"}, (
        "the loader's own batch stays as it was"
    )


def test_batches_without_labels_are_cut_and_padding_on_the_right_needs_no_mask() -> (
    None
):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 7:] = 0
    rank_batches = cut(2).parts(
        {"input_ids": batch()["input_ids"], "attention_mask": mask}
    )
    assert [set(rank_batch) for rank_batch in rank_batches] == [
        {"input_ids", "position_ids"}
    ] * 2


@pytest.mark.parametrize(
    ("refused_batch", "words"),
    [
        (torch.zeros(2, 12), "dicts of tensors"),
        ({"x": torch.zeros(2, 12)}, "no input_ids"),
        (batch(11), "pad_to_multiple_of=2"),
        (batch(2), "at least 2 tokens"),
        (batch(more=torch.zeros(2)), r"more of shape \(2,\)"),
        (
            batch(attention_mask=torch.tensor([[0] * 3 + [1] * 9, [1] * 12])),
            "Pad on the right",
        ),
        (batch(attention_mask=torch.ones(2, 1, 12, 12)), "Pad on the right"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(refused_batch: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        cut(2).parts(refused_batch)


def test_packed_sequences_and_other_lengths_than_promised_are_refused() -> None:
    with pytest.raises(StepError, match="packed"):
        cut(2).parts(batch(position_ids=torch.tensor([list(range(6)) * 2] * 2)))
    with pytest.raises(DataError, match="sp_seq_length=16"):
        cut(2, length=16).parts(batch())
    assert len(cut(2, length=12).parts(batch())) == 2


def test_settings_are_read_from_the_environment_and_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert DeepSpeedSequenceParallelConfig().sp_seq_length_is_variable is True
    with pytest.raises(
        ValueError, match="'eager' and 'flex_attention' are not supported"
    ):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager")
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_SP_SEQ_LENGTH"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    with pytest.raises(ValueError, match=r"one of \['deepspeed'\], but got torch"):
        ParallelismConfig(sp_size=2, sp_backend="torch")
    for name, value in {
        "SIZE": "2",
        "SEQ_LENGTH": "64",
        "SEQ_LENGTH_IS_VARIABLE": "false",
        "ATTN_IMPLEMENTATION": "sdpa",
    }.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_SP_{name}", value)
    handler = ParallelismConfig().sp_handler
    assert handler == DeepSpeedSequenceParallelConfig(64, False, "sdpa")


OPTIONS = {
    "sp_seq_length": 256,
    "sp_seq_length_is_variable": False,
    "sp_attn_implementation": "flash_attention_2",
}
SHOW = """
from accelerate import Accelerator
options = Accelerator(cpu=True).parallelism_config.sp_handler
print("found", options.sp_seq_length, options.sp_seq_length_is_variable, options.sp_attn_implementation)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["flags", "file"])
def test_a_launch_passes_the_options_of_sequences_to_its_workers(
    tmp_path: Path, source: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script, file = tmp_path / "show.py", tmp_path / "settings.yaml"
    script.write_text(SHOW)
    settings = {
        f"parallelism_config_{name}": value
        for name, value in {"sp_size": 2, **OPTIONS}.items()
    }
    file.write_text(json.dumps({"parallelism_config": settings}))  # JSON is YAML, too
    flags = [f"--{name}={value}" for name, value in settings.items()]
    words = flags if source == "flags" else ["--config_file", str(file)]
    assert launch.run(["--cpu", "--num_processes=2", *words, str(script)]) == 0
    assert capfd.readouterr().out.count("found 256 False flash_attention_2") == 2


def test_variables_of_a_launch_name_the_options_of_sequences() -> None:
    """As Accelerate 1.15 spells them; a length that was not given stands there as None, which is read, too."""
    words = ["--cpu", "--num_processes=2", "--parallelism_config_sp_size=2", "x.py"]
    variables = {
        name: value
        for name, value in variables_for(words).items()
        if name.startswith("PARALLELISM")
    }
    assert variables == {
        "PARALLELISM_CONFIG_SP_SIZE": "2",
        "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "True",
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
    }
    with patch_environment(**variables, PARALLELISM_CONFIG_SP_SEQ_LENGTH="None"):
        assert ParallelismConfig().sp_handler == DeepSpeedSequenceParallelConfig(
            None, True, "sdpa"
        )


@needs_transformers
def test_models_and_kernels_that_would_not_attend_to_other_parts_are_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    comm: Any = SimpleNamespace(size=2, rank=0, group=None)
    attention = SpannedAttention(comm, set(), lambda: False)
    with pytest.raises(
        PrepareError, match="Linear does not use transformers' AttentionInterface"
    ):
        attention.attach(nn.Linear(2, 2), "sdpa")
    sizes: Any = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    built: Any = LlamaForCausalLM  # untyped
    model = built(LlamaConfig(vocab_size=8, **sizes))
    model.set_attn_implementation("eager")
    for implementation, named in (
        (None, "eager"),
        ("flash_attention_2", "flash_attention_2"),
    ):
        with pytest.raises(
            PrepareError, match=f"{named}.*sp_attn_implementation='sdpa'"
        ):
            attention.attach(model, implementation)


def test_without_sp_size_there_is_nothing_to_split() -> None:
    with pytest.raises(ValueError, match="ParallelismConfig\\(sp_size"):
        Accelerator(cpu=True).deepspeed_ulysses_dl_adapter([], None)


@needs_transformers
@pytest.mark.exhaustive
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("stage", "processes"),
    [
        ("none", 2),
        ("none", 4),
        *(
            pytest.param(*case, marks=needs_deepspeed)
            for case in (("0", 2), ("2", 2), ("3", 2), ("2", 4))
        ),
    ],
)
def test_the_documented_loop_trains_like_plain_torch(
    tmp_path: Path, warm: Any, stage: str, processes: int
) -> None:
    """The script checks losses, evaluation, accumulation, recompute and skipped batches itself."""
    done = warm.run(tmp_path, [LOOP, stage], processes)
    assert not done.failed, done.err[0][-3000:]


@needs_transformers
@needs_deepspeed
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_trainer_has_the_losses_of_one_process(
    tmp_path: Path, warm: Any, parity: ModuleType
) -> None:
    reports = []
    for processes in (1, 2):
        out = tmp_path / f"{processes}.json"
        done = warm.run(tmp_path, [TRAINER, str(tmp_path / "run"), str(out)], processes)
        assert not done.failed, done.err[0][-3000:]
        reports.append(json.loads(out.read_text()))
    assert len(reports[0]) == 11
    assert parity.differences(*reports, tolerance=1e-5) == []
