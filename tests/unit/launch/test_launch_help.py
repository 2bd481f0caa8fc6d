"""The help of `hasten launch`: quick, without heavy packages, complete and grouped."""

from __future__ import annotations

import resource
import subprocess
import sys

from hasten.cli.launch_cmd import make_parser
from hasten.config.schema import SETTABLE

BUDGET_S = 0.300


def test_help_is_quick() -> None:
    best = float("inf")
    for _ in range(8):  # the CPU's time: a busy machine is not our slowness
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "hasten.cli.main", "launch", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if best < BUDGET_S:
            return
    raise AssertionError(f"`hasten launch --help` took {best:.3f} s, more than {BUDGET_S} s")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from hasten.cli.launch_cmd import make_parser; make_parser().format_help(); "
        "print([m for m in ('torch', 'numpy', 'rich', 'questionary', 'msgspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_every_setting_is_a_flag_in_both_spellings() -> None:
    known = make_parser()._option_string_actions  # the parser's own table
    for info in SETTABLE:
        for flag in info.flags:
            assert f"--{flag}" in known
            assert f"--{flag.replace('_', '-')}" in known
    assert {"-m", "-q", "-t"} <= set(known)


def test_help_is_grouped() -> None:
    text = make_parser().format_help()
    for group in ("general:", "processes and machines:", "sharded data parallel:", "DeepSpeed:"):
        assert f"\n{group}\n" in text
