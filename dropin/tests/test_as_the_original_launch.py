"""Launching and the helpers of tests answer as the original's do: examples, notebooks, variables, names that can be asked for."""

from __future__ import annotations

import importlib
import os
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from accelerate import debug_launcher, notebook_launcher
from accelerate.commands import estimate
from accelerate.commands import launch as launch_module
from accelerate.commands.launch import launch_command_parser
from accelerate.test_utils.examples import compare_against_test
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_simple_launcher_cmd_env,
)

# Any in this file: a module of which type checkers do not see every name.
commands: Any = launch_module


def an_example(name: str, *lines: str) -> str:
    """Write an example whose training function has these lines, and return its name."""
    inside = "".join(f"    {line}\n" for line in lines)
    script = f"def training_function(config):\n{inside}\ndef main():\n    run()\n    pass\nif __name__ == '__main__':\n"
    Path(name).write_text(script)
    return name


def parsed(*words: str) -> Namespace:
    """A command line with what `accelerate launch` adds to it."""
    parsed_args = commands._validate_launch_command(
        launch_command_parser().parse_args([*words, "train.py"])
    )[0]
    assert isinstance(parsed_args, Namespace)
    return parsed_args


def test_the_lines_that_an_example_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples").mkdir()
    mocked, epochs = (
        "if 'TESTING_MOCKED_DATALOADERS' in os.environ:",
        "config['epochs'] = 2",
    )
    an_example("examples/nlp_example.py", "tokenize()", "train()", "end()")
    complete = an_example(
        "complete.py", "resize()", "train()", "save()", mocked, "end()"
    )
    feature = an_example(
        "feature.py", "resize()", "log()", "save()", mocked, epochs, "end()"
    )
    assert compare_against_test(complete, feature, False) == ["    log()\n"]
    assert compare_against_test(complete, feature, True) == []
    images = an_example("images.py", "resize()", "train()")
    unrelated = an_example("other.py", "run()", "log()", "end()")
    assert compare_against_test(complete, unrelated, False) == [
        "    run()\n",
        "    log()\n",
    ]
    # `run()` is in nlp_example's `main`
    assert compare_against_test(complete, unrelated, False, images) == ["    log()\n"]
    an_example("examples/nlp_example.py", mocked)
    assert compare_against_test(complete, feature, False) == [
        "    log()\n",
        f"    {epochs}\n",
    ]


@pytest.mark.parametrize(
    "module_name",
    [
        "commands",
        "commands.config",
        "commands.config.config",
        "commands.config.default",
    ],
)
def test_every_name_that_a_module_lists_is_there(module_name: str) -> None:
    module = importlib.import_module(f"accelerate.{module_name}")
    assert [name for name in dir(module) if not hasattr(module, name)] == []
    assert not hasattr(module, "of_no_module")


def test_variables_of_fp8_have_the_names_of_the_settings() -> None:
    args = parsed("--cpu", "--mixed_precision", "fp8", "--fp8_backend", "te")
    args.fp8_amax_history_length = 9  # as settings files of older versions call it
    _, env = prepare_simple_launcher_cmd_env(args)
    assert (
        env["ACCELERATE_FP8_AMAX_HISTORY_LENGTH"] == "9"
        and env["ACCELERATE_FP8_BACKEND"] == "te"
    )
    assert env["ACCELERATE_FP8_OVERRIDE_DGRAD"] == "False"
    assert "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION" not in env


def test_a_hub_that_cannot_be_asked_lets_nobody_in() -> None:
    for error in (ConnectionError("no way there"), OSError("other")):
        with mock.patch.object(estimate, "model_info", side_effect=error):
            assert estimate.verify_on_hub("made/by-hand") == "gated"


def test_fields_of_deepspeed_that_a_file_settled_are_handed_on() -> None:
    args = parsed("--use_deepspeed", "--num_processes", "2")
    args.deepspeed_fields_from_accelerate_config = "zero_stage,gradient_clipping"
    with mock.patch("accelerate.utils.launch.is_port_in_use", return_value=False):
        _, env = prepare_deepspeed_cmd_env(args)
    assert env["ACCELERATE_CONFIG_DS_FIELDS"] == "zero_stage,gradient_clipping"


def test_one_process_of_a_notebook(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    precisions: list[str] = []
    run = mock.Mock(
        side_effect=lambda: precisions.append(os.environ["ACCELERATE_MIXED_PRECISION"])
    )
    notebook_launcher(run, num_processes=1)
    with mock.patch("torch.cuda.is_available", return_value=True):
        notebook_launcher(run, num_processes=1)
    with mock.patch("accelerate.launchers.is_mps_available", return_value=True):
        notebook_launcher(run, num_processes=1)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:] == [
        "Launching training on one GPU.",
        "Launching training on MPS.",
    ]
    assert (
        precisions == ["bf16"] * 3
        and notebook_launcher.__module__
        == debug_launcher.__module__
        == "accelerate.launchers"
    )
