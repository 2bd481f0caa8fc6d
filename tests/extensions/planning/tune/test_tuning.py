"""Tuning takes what is faster at equal losses, marks what differs, ends what is hopeless, and leaves the batch size alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hasten.cli.main import main
from hasten.config.root import Config
from hasten.errors import ConfigError
from hasten.extensions.planning.tune import tuning
from hasten.extensions.planning.tune.command import describe_result
from hasten.extensions.planning.tune.tuning import (
    Knob,
    SettingValues,
    TrialOutcome,
    TunedMachine,
    Tuning,
)

BASE = TrialOutcome(step_s=1.0, losses=(2.0, 1.0), convolutions=True)


def course(results: dict[str, TrialOutcome], *knobs: Knob, trials: int = 99) -> Tuning:
    """A tuning of a script that behaves as told, by the knob that was turned last."""
    tuning = Tuning(knobs)
    left = [trials]

    def measure(values: SettingValues) -> TrialOutcome:
        left[0] -= 1
        return results[list(values)[-1]] if values else BASE

    tuning.try_knobs(BASE, measure, lambda: left[0] > 1)
    return tuning


def test_faster_values_are_taken_on_top_of_each_other() -> None:
    tuning = course(
        {
            "a": TrialOutcome(step_s=0.8, losses=(2.0, 1.0)),
            "b": TrialOutcome(step_s=0.5, losses=(2.0, 1.0005)),
        },
        Knob("a", (1,)),
        Knob("b", (True,)),
    )
    assert tuning.best is not None
    assert tuning.best.values == {"a": 1, "b": True}
    assert tuning.gain == 2.0


def test_a_gain_that_a_second_look_does_not_show_is_dropped() -> None:
    plain = [
        TrialOutcome(step_s=1.0, losses=(2.0,)),
        TrialOutcome(step_s=0.7, losses=(2.0,)),
    ]

    def measure(values: SettingValues) -> TrialOutcome:
        return TrialOutcome(step_s=0.7, losses=(2.0,)) if values else plain.pop(0)

    busy = Tuning([Knob("a", (1,))])
    busy.try_knobs(plain.pop(0), measure, lambda: True)
    assert busy.best is busy.trials[0]
    assert busy.gain == 1.0


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (TrialOutcome(step_s=0.5, losses=(2.0, 1.1)), "losses differ by 10.0%"),
        (TrialOutcome(step_s=0.5, losses=(2.0, float("nan"))), "losses differ"),
        (TrialOutcome(step_s=0.99, losses=(2.0, 1.0)), "not faster"),
        (TrialOutcome(error="out of memory"), "failed: out of memory"),
    ],
)
def test_everything_else_is_marked_and_left_out(
    outcome: TrialOutcome, verdict: str
) -> None:
    tuning = course({"a": outcome}, Knob("a", (1,)))
    assert tuning.best is tuning.trials[0]
    assert verdict in tuning.trials[1].verdict


def test_a_script_without_losses_is_not_tuned() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no loss of the script went through accelerator.backward\(\)",
    ):
        Tuning([]).try_knobs(
            TrialOutcome(step_s=1.0), lambda values: BASE, lambda: True
        )


def test_tuning_ends_with_its_budget_and_gives_up_on_a_script_that_fails() -> None:
    tuning = course({"a": BASE}, Knob("a", (1, 2, 3)), trials=2)
    assert len(tuning.trials) == 2
    assert tuning.not_tried == [{"a": 2}, {"a": 3}]
    assert describe_result(
        tuning, ["fused=True"], "c.yaml", changes_settings=False
    ) == [
        "best: the unchanged script; no candidate is faster at equal losses",
        "not tried, because the budget was used up: a=2; a=3; increase --budget, or select candidates with --only",
        "  in the script: fused=True",
        "written: c.yaml, which changes no setting",
    ]
    with pytest.raises(ConfigError, match="no data"):
        Tuning([]).try_knobs(
            TrialOutcome(error="no data"), lambda values: BASE, lambda: True
        )


def test_a_speedup_is_confirmed_by_a_second_run_even_if_the_budget_is_used_up() -> None:
    faster = replace(BASE, step_s=BASE.step_s / 6)

    def gain(second: TrialOutcome) -> float:
        runs = [second]
        tuned = Tuning([Knob("a", (1, 2))])
        in_time = iter([True, False])
        tuned.try_knobs(
            BASE,
            lambda values: faster if values else runs.pop(0),
            lambda: next(in_time),
        )
        assert not runs
        return tuned.gain

    assert gain(BASE) == pytest.approx(6)
    assert gain(faster) == 1.0  # the machine was busy during the first run
    assert gain(TrialOutcome(error="killed")) == 1.0


def test_what_was_not_tried_is_named_by_its_values_where_others_were() -> None:
    knobs = (Knob("a", (1,)), Knob("num_workers", (1, 2, 4)), Knob("b", (True,)))
    tuning = course(
        {"a": replace(BASE, step_s=BASE.step_s / 2), "num_workers": BASE},
        *knobs,
        trials=3,
    )
    assert [dict(trial.values) for trial in tuning.trials] == [
        {},
        {"a": 1},
        {"a": 1, "num_workers": 1},
        {},
    ]
    assert [list(values)[-1] for values in tuning.not_tried] == [
        "num_workers",
        "num_workers",
        "b",
    ]
    nothing = course({}, Knob("a", (1, 2)), trials=1)
    assert describe_result(nothing, [], None, changes_settings=False) == [
        "only the unchanged script was measured",
        "not tried, because the budget was used up: a=1; a=2; increase --budget, or select candidates with --only",
    ]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--updates=0", "from 2"),
        ("--warmup=-1", "from 0"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_runs(
    flag: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('ran')")
    assert main(["tune", str(script), flag]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print(1)", "it made no update with an Accelerator"),
        (
            "raise SystemExit('ends with a point.')",
            "ends with a point. Run it directly first.",
        ),
    ],
)
def test_a_script_that_trains_nothing_is_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert main(["tune", str(script), "--budget", "200s"]) == 2
    assert message in capsys.readouterr().err


def test_knobs_are_those_that_make_sense() -> None:
    on_cpu = {knob.name for knob in tuning.list_knobs(TunedMachine(cores=2), BASE)}
    assert on_cpu == {"num_workers", "fused", "channels_last"}
    on_gpu = {
        knob.name for knob in tuning.list_knobs(TunedMachine(cuda=True, cores=16), BASE)
    }
    assert on_gpu > {"mixed_precision", "tf32", "compile", "prefetch"}
    assert "mixed_precision" not in {
        k.name
        for k in tuning.list_knobs(
            TunedMachine(cuda=True), replace(BASE, precision="bf16")
        )
    }


def test_names_of_knobs_are_checked_before_anything_runs() -> None:
    everywhere = TunedMachine(cuda=True, cores=16, has_compiler=True)
    captured = replace(BASE, captures_step=True)
    assert {knob.name for knob in tuning.list_knobs(everywhere, captured)} == set(
        tuning.KNOB_NAMES
    )
    with pytest.raises(
        ConfigError, match=r"--only fusd: unknown candidate; did you mean fused\?"
    ):
        tuning.check_names(["compile", "fusd"])
    with pytest.raises(
        ConfigError,
        match="--only tf32: it does not apply to this script on this machine",
    ):
        tuning.select_knobs(tuning.list_knobs(TunedMachine(), BASE), ["tf32"])


def test_values_become_settings_or_advice() -> None:
    config = tuning.config_of(
        {"mixed_precision": "bf16", "compile": "regional", "prefetch": 4}
    )
    assert config.mixed_precision == "bf16"
    assert config.dynamo.use_regional_compilation
    assert config.dataloader.prefetch == 4
    assert tuning.config_of({}) == Config()
    lines = tuning.list_script_changes(
        {"num_workers": 4}, tuning.list_knobs(TunedMachine(cores=8), BASE)
    )
    assert lines == ["DataLoader(..., num_workers=4)"]


def test_ways_of_compiling_depend_on_the_step() -> None:
    def ways(base: TrialOutcome) -> tuple[str, ...]:
        (knob,) = [
            knob
            for knob in tuning.list_knobs(TunedMachine(cuda=True), base)
            if knob.name == "compile"
        ]
        return knob.values

    quick = replace(BASE, step_s=0.002)
    assert ways(quick) == ("regional", "whole", "cuda graph")
    assert ways(replace(quick, step_s=0.2)) == ("regional", "whole")
    assert ways(replace(quick, captures_step=True)) == ("regional", "whole"), (
        "the captured step is one graph already"
    )
    assert ways(replace(quick, computes_loss=True))[0] == "regional and loss"
    assert tuning.config_of({"compile": "regional and loss"}).dynamo.compile_loss


def test_budgets_are_durations() -> None:
    assert [tuning.parse_duration(text) for text in ("90", "90s", "10m", "1.5h")] == [
        90,
        90,
        600,
        5400,
    ]
    for text in ("soon", "0m", "-3s", "10 minutes"):
        with pytest.raises(ConfigError, match="is not a duration"):
            tuning.parse_duration(text)


@pytest.mark.exhaustive
@pytest.mark.timeout(310)
def test_the_digits_example_is_tuned_from_end_to_end(tmp_path: Path) -> None:
    """Real runs of a real script: the table has the script as it is and candidates, and the settings are written."""
    script = Path(__file__).parents[4] / "examples" / "digits.py"
    options = [
        "--budget",
        "90s",
        "--updates",
        "10",
        "--json",
        "-o",
        str(tmp_path / "config.yaml"),
    ]
    command = [
        sys.executable,
        "-m",
        "hasten.cli.main",
        "tune",
        str(script),
        *options,
        "--",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert trials[0]["verdict"] == "as it is"
    assert trials[0]["step_s"] > 0
    assert len(trials) > 1
    assert (tmp_path / "config.yaml").is_file()
    assert not (tmp_path / "run").exists(), "nothing of a trial is saved"
