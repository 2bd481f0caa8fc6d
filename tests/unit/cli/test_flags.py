"""Flags: booleans never swallow the script, both spellings, groups in the help, and the command that finds subcommands."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

import pytest

from hasten.cli.flags import (
    SettingsParser,
    UsageError,
    flag_spellings,
    value_placeholder,
)
from hasten.cli.main import commands, main
from hasten.config.schema import SETTABLE
from hasten.errors import UnknownSettingError
from hasten.version import __version__


def launch_like() -> SettingsParser:
    """A parser as `hasten launch` has it: settings, then a script and its own arguments."""
    parser = SettingsParser(prog="hasten launch")
    parser.add_settings()
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser


PARSER = launch_like()


def parse_line(line: str) -> tuple[str, list[str], dict[str, str]]:
    """Return script, its arguments, and the settings of a command line."""
    parsed_args = PARSER.parse_args(line.split())
    return (
        parsed_args.script,
        parsed_args.args,
        {entry.name: entry.value for entry in parsed_args.settings},
    )


@pytest.mark.parametrize(
    ("line", "cpu"),
    [
        ("--cpu train.py", "true"),
        ("--cpu true train.py", "true"),
        ("--cpu=true train.py", "true"),
        ("--cpu false train.py", "false"),
        ("--cpu=False train.py", "False"),
        ("--no-cpu train.py", "false"),
        ("--no_cpu train.py", "false"),
        ("--use_cpu train.py", "true"),
        ("--use-cpu yes train.py", "yes"),
    ],
)
def test_booleans(line: str, cpu: str) -> None:
    assert parse_line(line) == ("train.py", [], {"cpu": cpu})


def test_everything_after_the_script_is_the_scripts() -> None:
    script, args, settings = parse_line(
        "--num-processes 2 train.py --cpu --lr 3 --num_proceses 5 -- x"
    )
    assert (script, args) == (
        "train.py",
        ["--cpu", "--lr", "3", "--num_proceses", "5", "--", "x"],
    )
    assert settings == {"launch.num_processes": "2"}


def test_negative_numbers_short_flags_and_flags_that_begin_with_no() -> None:
    line = "-m -q -t 3 --tp_size -1 --no_python --megatron_lm_no_load_optim=false mod"
    assert parse_line(line)[2] == {
        "launch.module": "true",
        "launch.quiet": "true",
        "launch.tee": "3",
        "parallelism.tp_size": "-1",
        "launch.no_python": "true",
        "megatron.no_load_optim": "false",
    }


def test_established_names() -> None:
    line = (
        "--use_fsdp --use_parallelism_config --fsdp_offload_params true --fsdp_sharding_strategy FULL_SHARD "
        "--fsdp_transformer_layer_cls_to_wrap Block --fsdp_version 2 --zero_stage 2 --deepspeed_config_file ds.json "
        "--dynamo_use_fullgraph true --gradient_accumulation_steps 4 --fp8_format E4M3 --no_tpu_cluster "
        "--parallelism_config_cp_comm_strategy alltoall train.py"
    )
    assert parse_line(line)[2] == {
        "strategy": "fsdp",
        "fsdp.cpu_offload": "true",
        "fsdp.sharding_strategy": "FULL_SHARD",
        "fsdp.transformer_cls_names_to_wrap": "Block",
        "fsdp.version": "2",
        "deepspeed.zero_stage": "2",
        "deepspeed.hf_ds_config": "ds.json",
        "dynamo.fullgraph": "true",
        "gradient_accumulation.num_steps": "4",
        "fp8.te.fp8_format": "E4M3",
        "xla.tpu_use_cluster": "false",
        "parallelism.cp_handler.cp_comm_strategy": "alltoall",
    }
    assert parse_line("--use_fsdp false train.py")[2] == {}


def test_unknown_flags_and_missing_values() -> None:
    with pytest.raises(UnknownSettingError, match="did you mean --num_processes"):
        parse_line("--num_procs 2 train.py")
    with pytest.raises(UnknownSettingError, match="did you mean --num-machines"):
        parse_line("--num-machine 2 train.py")
    with pytest.raises(UsageError, match="expected one argument"):
        parse_line("--num_processes")
    with pytest.raises(UsageError, match="required: script"):
        parse_line("--cpu")


def test_help_lists_every_setting_once_in_groups() -> None:
    text = PARSER.format_help()
    firsts = [
        word
        for line in text.splitlines()
        for word in line.replace(",", " ").split()[:2]
        if word[:2] == "--"
    ]
    for info in SETTABLE:
        assert firsts.count(f"--{flag_spellings(info)[0]}") == 1, info.flag
    for group in (
        "processes and machines:",
        "sharded data parallel:",
        "DeepSpeed:",
        "established names:",
    ):
        assert group in text
    assert max(len(line) for line in text.splitlines()) <= 140
    assert value_placeholder(int | None) == "N"


def test_the_package_runs_as_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "hasten", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert __version__ in shown.stdout


def test_main_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert "config " in out
    assert out.strip().splitlines()[-1].startswith("hasten 0.")


def test_main_suggests_the_nearest_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launhc"]) == 2
    assert (
        capsys.readouterr().err
        == "hasten launhc: there is no command 'launhc'; did you mean `hasten launch`?\n"
    )
    assert main(["zzzzzz"]) == 2
    assert "the commands are launch" in capsys.readouterr().err


def seconds_of(code: str) -> float:
    """Run code in a fresh interpreter and return the processor time it took, which a busy machine changes least."""
    usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        usage_after.ru_utime
        + usage_after.ru_stime
        - usage_before.ru_utime
        - usage_before.ru_stime
    )


@pytest.mark.timed
def test_help_needs_neither_torch_nor_time() -> None:
    code = (
        "import sys; from hasten.cli.main import main; main(['--help']); "
        "assert not {'torch', 'numpy', 'yaml', 'rich', 'questionary', 'argparse'} & set(sys.modules), sorted(sys.modules)"
    )
    assert any(seconds_of(code) < 0.15 for _ in range(8))


@pytest.mark.timed
def test_help_of_launch_needs_neither_torch_nor_time() -> None:
    code = (
        "import sys; from hasten.cli.main import main\n"
        "try: main(['launch', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'rich', 'questionary'} & set(sys.modules)"
    )
    assert any(seconds_of(code) < 0.3 for _ in range(8))


def test_a_subcommands_help_needs_no_torch() -> None:
    code = (
        "import sys; from hasten.cli.main import main\n"
        "try: main(['config', 'show', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'questionary'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_command_has_a_line_of_help() -> None:
    assert all(
        text and command_path.startswith("hasten.")
        for command_path, text in commands().values()
    )
