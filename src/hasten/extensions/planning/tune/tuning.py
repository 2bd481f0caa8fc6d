"""Search of `hasten tune`: the knobs, their order, the comparison of losses, and early stopping. No torch."""

from __future__ import annotations

import math
import re
import signal
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from hasten.config.resolve import resolve
from hasten.config.root import Config
from hasten.errors import ConfigError

SAME_PRECISION_TOLERANCE: Final = 1e-3
"""Relative difference of losses that rounding in the same precision may cause over some steps."""
HALF_PRECISION_TOLERANCE: Final = 3e-2
"""Relative difference of losses between float32 and half precision."""
HALF_SCRIPT_TOLERANCE: Final = 1e-2
"""Relative difference of losses if the script itself uses half precision, where reordered operations round more."""
MIN_SPEEDUP: Final = 0.02
"""Speedup above which a candidate is taken; less is noise."""
LAUNCH_BOUND_STEP_S: Final = 0.1
"""Step time of the unchanged script above which it does not wait for kernels to be launched, so that CUDA graphs gain nothing."""
KNOB_NAMES: Final = (
    *(
        "mixed_precision",
        "fused",
        "compile",
        "step_graph",
        "num_workers",
        "channels_last",
    ),
    *("tf32", "prefetch"),
)
"""Names of all knobs."""
SettingValues = Mapping[str, Any]  # Any: numbers, names and flags
COMPILE_SETTINGS: Final = MappingProxyType[str, Mapping[str, Any]](
    {
        "regional": MappingProxyType(
            {"backend": "inductor", "use_regional_compilation": True}
        ),
        "regional and loss": MappingProxyType(
            {
                "backend": "inductor",
                "use_regional_compilation": True,
                "compile_loss": True,
            }
        ),
        "whole": MappingProxyType({"backend": "inductor"}),
        "cuda graph": MappingProxyType(
            {"backend": "inductor", "mode": "reduce-overhead"}
        ),
    }
)
"""Settings of torch.compile for each value of the knob "compile"."""
TAKEN_VERDICT: Final = "faster: taken"


@dataclass(frozen=True, slots=True)
class Knob:
    """One adjustable option, and the values to try."""

    name: str
    values: tuple[Any, ...]  # Any: numbers, names and flags
    tolerance: float = SAME_PRECISION_TOLERANCE
    advice: str = ""
    """Change of the script for a knob that is not a setting of hasten; `{}` is the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedMachine:
    """Properties of the machine that determine the applicable knobs."""

    cuda: bool = False
    cores: int = 1
    has_compiler: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """Measurements of one trial."""

    step_s: float = 0.0
    peak_bytes: int = 0
    losses: tuple[float, ...] = ()
    convolutions: bool = False
    precision: str = "no"
    captures_step: bool = False
    """True if the script passes its step to `capture_step()`."""
    computes_loss: bool = False
    """True for a model of transformers, whose loss can be compiled with its blocks."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the script: its values, its measurements, and the verdict."""

    values: SettingValues
    outcome: TrialOutcome
    verdict: str


RunTrial = Callable[[SettingValues], TrialOutcome]
"""Runs the script with values."""


@dataclass(slots=True)
class Tuning:
    """A tuning run: a baseline, then one knob after the other on top of the best values so far."""

    knobs: Sequence[Knob]
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    not_tried: list[SettingValues] = field(default_factory=list)
    """Values that were not tried for lack of time."""

    def try_knobs(
        self, baseline: TrialOutcome, run_trial: RunTrial, in_time: Callable[[], bool]
    ) -> None:
        """Measure each value of each knob until time is up, and the unchanged script again to confirm a speedup over `baseline`.

        Raises: ConfigError when the unchanged script does not run.
        """
        if baseline.error:
            missed_goal = "enough updates" if baseline.losses else "its updates"
            raise ConfigError(
                f"the unchanged script does not reach {missed_goal}: {baseline.error.rstrip('.')}. Run it directly first."
            )
        if not baseline.losses:
            raise ConfigError(
                "no loss of the script went through accelerator.backward(), so losses of trials cannot be compared; call "
                "accelerator.backward(loss)."
            )
        best_trial = unchanged_trial = Trial({}, baseline, "as it is")
        self.trials.append(unchanged_trial)
        for knob in self.knobs:
            for knob_value in knob.values:
                setting_values = {**best_trial.values, knob.name: knob_value}
                if not in_time():
                    self.not_tried.append(setting_values)
                    continue
                outcome = run_trial(setting_values)
                verdict = judge_trial(
                    outcome, baseline, best_trial.outcome, knob.tolerance
                )
                self.trials.append(Trial(setting_values, outcome, verdict))
                if verdict == TAKEN_VERDICT:
                    best_trial = self.trials[-1]
        self.best = best_trial
        # a machine that was busy at first exaggerates speedups
        if best_trial is not unchanged_trial:
            second_outcome = run_trial({})
            if second_outcome.error:
                verdict = f"failed: {second_outcome.error}"
            else:
                verdict = "as it is"
            self.trials.append(Trial({}, second_outcome, verdict))
            if second_outcome.step_s * (1 - MIN_SPEEDUP) <= best_trial.outcome.step_s:
                self.best = unchanged_trial

    @property
    def gain(self) -> float:
        """Speedup of the best values over the fastest run of the unchanged script."""
        assert self.best is not None, "the baseline comes first"
        unchanged_steps_s = []
        for trial in self.trials:
            if not trial.values:
                unchanged_steps_s.append(trial.outcome.step_s)
        if self.best.values:
            return min(unchanged_steps_s) / self.best.outcome.step_s
        return 1.0


def judge_trial(
    outcome: TrialOutcome,
    baseline: TrialOutcome,
    best_outcome: TrialOutcome,
    tolerance: float,
) -> str:
    """Return the verdict on a trial: TAKEN, or the reason why its values are not taken."""
    if outcome.error:
        return f"failed: {outcome.error}"
    loss_difference = largest_loss_difference(baseline.losses, outcome.losses)
    if loss_difference > tolerance:
        return f"losses differ by {loss_difference:.1%}, more than {tolerance:.1%}"
    if outcome.step_s < best_outcome.step_s * (1 - MIN_SPEEDUP):
        return TAKEN_VERDICT
    return "not faster"


def largest_loss_difference(
    expected_losses: Sequence[float], actual_losses: Sequence[float]
) -> float:
    """Return the largest relative difference between losses of the same updates; infinite if one is NaN."""
    largest_difference = 0.0
    for expected_loss, actual_loss in zip(expected_losses, actual_losses, strict=False):
        relative_difference = abs(expected_loss - actual_loss) / max(
            abs(expected_loss), 1e-6
        )
        if math.isnan(relative_difference):
            largest_difference = math.inf
        else:
            largest_difference = max(largest_difference, relative_difference)
    return largest_difference


def list_knobs(machine: TunedMachine, baseline: TrialOutcome) -> list[Knob]:
    """Return the knobs that apply to this machine and script, the most promising first."""
    if baseline.precision == "no":
        tolerance = SAME_PRECISION_TOLERANCE
    else:
        tolerance = HALF_SCRIPT_TOLERANCE
    computes_in_fp32_on_gpu = machine.cuda and baseline.precision == "no"
    worker_counts = tuple(
        num_workers for num_workers in (1, 2, 4, 8) if num_workers <= machine.cores
    )
    rows = [
        (
            computes_in_fp32_on_gpu,
            Knob("mixed_precision", ("bf16",), HALF_PRECISION_TOLERANCE),
        ),
        (
            True,
            Knob("fused", (True,), tolerance, advice="the optimizer with fused=True"),
        ),
        (
            machine.has_compiler or machine.cuda,
            Knob("compile", _compile_values(machine, baseline), tolerance),
        ),
        (
            machine.cuda and baseline.captures_step,
            Knob("step_graph", (True,), tolerance),
        ),
        (
            True,
            Knob(
                "num_workers", worker_counts, advice="DataLoader(..., num_workers={})"
            ),
        ),
        (
            baseline.convolutions,
            Knob(
                "channels_last",
                (True,),
                tolerance,
                advice="model.to(memory_format=torch.channels_last)",
            ),
        ),
        (
            computes_in_fp32_on_gpu,
            Knob(
                "tf32",
                (True,),
                HALF_PRECISION_TOLERANCE,
                advice='torch.set_float32_matmul_precision("high")',
            ),
        ),
        (machine.cuda, Knob("prefetch", (0, 4))),
    ]
    return [knob for applies, knob in rows if applies]


def _compile_values(machine: TunedMachine, baseline: TrialOutcome) -> tuple[str, ...]:
    """Return the values of the knob "compile" that may gain."""
    compile_values = ["regional", "whole"]
    if machine.cuda and baseline.computes_loss:
        compile_values.insert(0, "regional and loss")
    # a captured step is one CUDA graph
    if (
        machine.cuda
        and baseline.step_s <= LAUNCH_BOUND_STEP_S
        and not baseline.captures_step
    ):
        compile_values.append("cuda graph")
    return tuple(compile_values)


def check_names(knob_names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not a knob."""
    for knob_name in knob_names:
        if knob_name not in KNOB_NAMES:
            close_names = get_close_matches(knob_name, KNOB_NAMES, n=1, cutoff=0.5)
            if close_names:
                hint = f"did you mean {close_names[0]}?"
            else:
                hint = f"there are {', '.join(KNOB_NAMES)}."
            raise ConfigError(f"--only {knob_name}: unknown candidate; {hint}")


def select_knobs(applicable: Sequence[Knob], knob_names: Sequence[str]) -> list[Knob]:
    """Return the knobs with the given names, in that order; all knobs if no names are given.

    Raises: ConfigError for a knob that does not apply here.
    """
    knob_by_name = {knob.name: knob for knob in applicable}
    for missing_name in knob_names:
        if missing_name in knob_by_name:
            continue
        raise ConfigError(
            f"--only {missing_name}: it does not apply to this script on this machine, where {', '.join(knob_by_name)} can be tried; remove it."
        )
    return [knob_by_name[knob_name] for knob_name in knob_names] or list(applicable)


def settings_of(setting_values: SettingValues) -> dict[str, Any]:
    """Return the arguments of an Accelerator for a choice of values, as far as there are settings for them."""
    settings = {}
    if "mixed_precision" in setting_values:
        settings["mixed_precision"] = setting_values["mixed_precision"]
    if "prefetch" in setting_values:
        settings["dataloader.prefetch"] = setting_values["prefetch"]
    if setting_values.get("step_graph"):
        settings["performance"] = {"mode": "auto", "compile": False}
    if "compile" in setting_values:
        for setting_name, setting_value in COMPILE_SETTINGS[
            setting_values["compile"]
        ].items():
            settings[f"dynamo.{setting_name}"] = setting_value
    return settings


def config_of(setting_values: SettingValues) -> Config:
    """Return the settings for a choice of values."""
    return resolve(code=settings_of(setting_values), env={}).config


def list_script_changes(
    setting_values: SettingValues, tried_knobs: Sequence[Knob]
) -> list[str]:
    """Return the changes of the script for values that are not settings."""
    advice = []
    for knob in tried_knobs:
        if knob.advice and knob.name in setting_values:
            advice.append(knob.advice.format(setting_values[knob.name]))
    return advice


def parse_duration(duration_text: str) -> float:
    """Return a duration from "90", "90s", "10m" or "1.5h".

    Raises: ConfigError for anything else.
    """
    matched_text = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", duration_text.strip())
    if matched_text is None or float(matched_text[1]) == 0:
        raise ConfigError(
            f"budget {duration_text!r} is not a duration; write 90s, 10m or 1h."
        )
    return float(matched_text[1]) * {"s": 1, "m": 60, "h": 3600}[matched_text[2] or "s"]


_CAUSE_CHARS: Final = 160


def describe_error(error: BaseException) -> str:
    """Return the class of an exception, and the first line of its message."""
    lines = str(error).strip().splitlines()
    error_class = type(error).__name__
    return _shorten_text(f"{error_class}: {lines[0]}" if lines else error_class)


def describe_exit(stderr: str, code: int) -> str:
    """Return the cause of exit code `code`: the signal, the last line of the output, or the code."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = stderr.strip().splitlines()
    return _shorten_text(lines[-1]) if lines else f"exit code {code}"


def _shorten_text(text: str) -> str:
    return textwrap.shorten(text, _CAUSE_CHARS, placeholder=" …")
