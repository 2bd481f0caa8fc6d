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

SAME: Final = 1e-3
"""Relative difference of losses that rounding in the same precision may cause over some steps."""
HALF: Final = 3e-2
"""Relative difference of losses between float32 and half precision."""
ROUNDED: Final = 1e-2
"""Relative difference of losses if the script itself uses half precision, where reordered operations round more."""
WORTH: Final = 0.02
"""Speedup above which a candidate is taken; less is noise."""
LAUNCHED_S: Final = 0.1
"""Step time of the unchanged script above which it does not wait for kernels to be launched, so that CUDA graphs gain nothing."""
NAMES: Final = (
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
Values = Mapping[str, Any]  # Any: numbers, names and flags
WAYS: Final = MappingProxyType[str, Mapping[str, Any]](
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
TAKEN: Final = "faster: taken"


@dataclass(frozen=True, slots=True)
class Knob:
    """One adjustable option, and the values to try."""

    name: str
    values: tuple[Any, ...]  # Any: numbers, names and flags
    tolerance: float = SAME
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

    values: Values
    outcome: TrialOutcome
    verdict: str


Measure = Callable[[Values], TrialOutcome]
"""Runs the script with values."""


@dataclass(slots=True)
class Tuning:
    """A tuning run: a baseline, then one knob after the other on top of the best values so far."""

    knobs: Sequence[Knob]
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    not_tried: list[Values] = field(default_factory=list)
    """Values that were not tried for lack of time."""

    def run(
        self, baseline: TrialOutcome, measure: Measure, in_time: Callable[[], bool]
    ) -> None:
        """Measure each value of each knob until time is up, and the unchanged script again to confirm a speedup over `baseline`.

        Raises: ConfigError when the unchanged script does not run.
        """
        if baseline.error:
            goal = "enough updates" if baseline.losses else "its updates"
            raise ConfigError(
                f"the unchanged script does not reach {goal}: {baseline.error.rstrip('.')}. Run it directly first."
            )
        if not baseline.losses:
            raise ConfigError(
                "no loss of the script went through accelerator.backward(), so losses of trials cannot be compared; call "
                "accelerator.backward(loss)."
            )
        best = unchanged = Trial({}, baseline, "as it is")
        self.trials.append(unchanged)
        for knob in self.knobs:
            for value in knob.values:
                values = {**best.values, knob.name: value}
                if not in_time():
                    self.not_tried.append(values)
                    continue
                outcome = measure(values)
                verdict = judge(outcome, baseline, best.outcome, knob.tolerance)
                self.trials.append(Trial(values, outcome, verdict))
                if verdict == TAKEN:
                    best = self.trials[-1]
        self.best = best
        # a machine that was busy at first exaggerates speedups
        if best is not unchanged:
            repeated = measure({})
            verdict = f"failed: {repeated.error}" if repeated.error else "as it is"
            self.trials.append(Trial({}, repeated, verdict))
            if repeated.step_s * (1 - WORTH) <= best.outcome.step_s:
                self.best = unchanged

    @property
    def gain(self) -> float:
        """Speedup of the best values over the fastest run of the unchanged script."""
        assert self.best is not None, "the baseline comes first"
        unchanged = [trial.outcome.step_s for trial in self.trials if not trial.values]
        return min(unchanged) / self.best.outcome.step_s if self.best.values else 1.0


def judge(
    outcome: TrialOutcome, baseline: TrialOutcome, best: TrialOutcome, tolerance: float
) -> str:
    """Return the verdict on a trial: TAKEN, or the reason why its values are not taken."""
    if outcome.error:
        return f"failed: {outcome.error}"
    loss_difference = difference(baseline.losses, outcome.losses)
    if loss_difference > tolerance:
        return f"losses differ by {loss_difference:.1%}, more than {tolerance:.1%}"
    return TAKEN if outcome.step_s < best.step_s * (1 - WORTH) else "not faster"


def difference(expected: Sequence[float], actual: Sequence[float]) -> float:
    """Return the largest relative difference between losses of the same updates; infinite if one is NaN."""
    largest = 0.0
    for first, second in zip(expected, actual, strict=False):
        relative = abs(first - second) / max(abs(first), 1e-6)
        largest = math.inf if math.isnan(relative) else max(largest, relative)
    return largest


def knobs(machine: TunedMachine, base: TrialOutcome) -> list[Knob]:
    """Return the knobs that apply to this machine and script, the most promising first."""
    same = SAME if base.precision == "no" else ROUNDED
    computes_in_fp32_on_gpu = machine.cuda and base.precision == "no"
    workers = tuple(number for number in (1, 2, 4, 8) if number <= machine.cores)
    rows = [
        (computes_in_fp32_on_gpu, Knob("mixed_precision", ("bf16",), HALF)),
        (True, Knob("fused", (True,), same, advice="the optimizer with fused=True")),
        (
            machine.has_compiler or machine.cuda,
            Knob("compile", _ways(machine, base), same),
        ),
        (machine.cuda and base.captures_step, Knob("step_graph", (True,), same)),
        (True, Knob("num_workers", workers, advice="DataLoader(..., num_workers={})")),
        (
            base.convolutions,
            Knob(
                "channels_last",
                (True,),
                same,
                advice="model.to(memory_format=torch.channels_last)",
            ),
        ),
        (
            computes_in_fp32_on_gpu,
            Knob(
                "tf32",
                (True,),
                HALF,
                advice='torch.set_float32_matmul_precision("high")',
            ),
        ),
        (machine.cuda, Knob("prefetch", (0, 4))),
    ]
    return [knob for applies, knob in rows if applies]


def _ways(machine: TunedMachine, base: TrialOutcome) -> tuple[str, ...]:
    """Return the values of the knob "compile" that may gain."""
    ways = ["regional", "whole"]
    if machine.cuda and base.computes_loss:
        ways.insert(0, "regional and loss")
    # a captured step is one CUDA graph
    if machine.cuda and base.step_s <= LAUNCHED_S and not base.captures_step:
        ways.append("cuda graph")
    return tuple(ways)


def check_names(only: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not a knob."""
    for name in only:
        if name not in NAMES:
            near = get_close_matches(name, NAMES, n=1, cutoff=0.5)
            hint = (
                f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}."
            )
            raise ConfigError(f"--only {name}: unknown candidate; {hint}")


def chosen(applicable: Sequence[Knob], only: Sequence[str]) -> list[Knob]:
    """Return the knobs with the given names, in that order; all knobs if no names are given.

    Raises: ConfigError for a knob that does not apply here.
    """
    knob_by_name = {knob.name: knob for knob in applicable}
    if missing := next((name for name in only if name not in knob_by_name), None):
        raise ConfigError(
            f"--only {missing}: it does not apply to this script on this machine, where {', '.join(knob_by_name)} can be tried; remove it."
        )
    return [knob_by_name[name] for name in only] or list(applicable)


def settings_of(values: Values) -> dict[str, Any]:
    """Return the arguments of an Accelerator for a choice of values, as far as there are settings for them."""
    settings = {}
    if "mixed_precision" in values:
        settings["mixed_precision"] = values["mixed_precision"]
    if "prefetch" in values:
        settings["dataloader.prefetch"] = values["prefetch"]
    if values.get("step_graph"):
        settings["performance"] = {"mode": "auto", "compile": False}
    if "compile" in values:
        for name, value in WAYS[values["compile"]].items():
            settings[f"dynamo.{name}"] = value
    return settings


def config_of(values: Values) -> Config:
    """Return the settings for a choice of values."""
    return resolve(code=settings_of(values), env={}).config


def advice(values: Values, tried: Sequence[Knob]) -> list[str]:
    """Return the changes of the script for values that are not settings."""
    return [
        knob.advice.format(values[knob.name])
        for knob in tried
        if knob.advice and knob.name in values
    ]


def seconds(text: str) -> float:
    """Return a duration from "90", "90s", "10m" or "1.5h".

    Raises: ConfigError for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"budget {text!r} is not a duration; write 90s, 10m or 1h.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"]


_CAUSE_CHARS: Final = 160


def happened(error: BaseException) -> str:
    """Return the class of an exception, and the first line of its message."""
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return _short(f"{name}: {lines[0]}" if lines else name)


def in_output(stderr: str, code: int) -> str:
    """Return the cause of exit code `code`: the signal, the last line of the output, or the code."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = stderr.strip().splitlines()
    return _short(lines[-1]) if lines else f"exit code {code}"


def _short(text: str) -> str:
    return textwrap.shorten(text, _CAUSE_CHARS, placeholder=" …")
