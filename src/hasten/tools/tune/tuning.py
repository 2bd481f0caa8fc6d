"""Search of `hasten tune`: the knobs, their order, the comparison of losses, and early stopping. No torch."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from hasten.config.root import Config
from hasten.config.sections.loop import PerformanceSettings, TorchDynamoPlugin
from hasten.config.sections.parallel import DistributedDataParallelKwargs
from hasten.errors import ConfigError

SAME: Final = 1e-3
"""Relative difference of losses that rounding in the same precision may cause over some steps."""
HALF: Final = 3e-2
"""Relative difference of losses between float32 and half precision."""
ROUNDED: Final = 1e-2
"""Relative difference of losses if the script itself uses half precision, where reordered operations round more."""
NOISY: Final = 3.0
"""Multiple of the difference between two runs of the unchanged script that is allowed: its own kernels may not be deterministic."""
WORTH: Final = 0.02
"""Speedup above which a candidate is taken; less is noise."""
HOPELESS: Final = 1.5
"""Ratio of the step time to the best one above which a trial ends early."""
FEW_BYTES: Final = 2**30
"""Peak memory on a GPU below which it is not weighed."""
LAUNCHED_S: Final = 0.1
"""Step time of the unchanged script above which it does not wait for kernels to be launched, so that CUDA graphs gain nothing."""
LOGITS: Final = 0.05
"""Share of the peak memory that the float32 logits take where computing the loss in chunks is tried."""
FP8_GAIN: Final = 1.1
"""Predicted speedup of the linear layers above which fp8 is tried."""
NAMES: Final = (
    *("mixed_precision", "fused", "compile", "fp8", "chunked_loss", "step_graph", "num_workers", "channels_last"),
    *("tf32", "prefetch", "bucket_cap_mb", "batch_size", "recompute"),
)
"""Names of all knobs."""
Values = Mapping[str, Any]  # Any: numbers, names and flags
WAYS: Final = MappingProxyType[str, Mapping[str, Any]](
    {
        "regional": MappingProxyType({"backend": "inductor", "use_regional_compilation": True}),
        "regional and loss": MappingProxyType(
            {"backend": "inductor", "use_regional_compilation": True, "compile_loss": True}
        ),
        "whole": MappingProxyType({"backend": "inductor"}),
        "cuda graph": MappingProxyType({"backend": "inductor", "mode": "reduce-overhead"}),
    }
)
"""Settings of torch.compile for each value of the knob "compile"."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One adjustable option, and the values to try."""

    name: str
    values: tuple[Any, ...]  # Any: numbers, names and flags
    tolerance: float = SAME
    advice: str = ""
    """Change of the script for a knob that is not a setting of hasten; `{}` is the value."""
    allowed: bool = True
    """False for a knob that is measured and reported, and not taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedMachine:
    """Properties of the machine that determine the applicable knobs."""

    cuda: bool = False
    cores: int = 1
    processes: int = 1
    has_compiler: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """Measurements of one trial."""

    step_s: float = 0.0
    samples_per_s: float = 0.0
    peak_bytes: int = 0
    losses: tuple[float, ...] = ()
    batch_size: int = 0
    block_classes: tuple[str, ...] = ()
    convolutions: bool = False
    precision: str = "no"
    whole_step: bool = False
    """Whether the script passes its step to `capture_step()`."""
    linears: tuple[tuple[int, int, int], ...] = ()
    """Rows of the input, input and output features of each linear layer in the first forward."""
    vocabulary: int = 0
    """Entries of the vocabulary of a model whose loss can be computed in chunks."""
    has_fp8: bool = False
    """True with a Hopper GPU or a newer one, and torchao."""
    error: str = ""
    gave_up: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the script: its values, its measurements, and the verdict."""

    values: Values
    outcome: TrialOutcome
    verdict: str
    difference: float = 0.0


Measure = Callable[[Values, float | None], TrialOutcome]
"""Runs the script with values, and with the step time beyond which the trial is hopeless."""


@dataclass(slots=True)
class Tuning:
    """A tuning run: a baseline, then one knob after the other on top of the best values so far."""

    knobs: Sequence[Knob]
    weighs_memory: bool = False
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    not_tried: list[Values] = field(default_factory=list)
    """Values that were not tried for lack of time."""
    unconfirmed: str = ""
    """Error of the second run of the unchanged script, without which the speedup is not confirmed."""
    _again: TrialOutcome | None = None
    """The unchanged script, run a second time."""

    def run(self, measure: Measure, in_time: Callable[[], bool]) -> None:
        """Measure the script unchanged, with each value of each knob until time is up, and unchanged again to confirm a speedup.

        `measure` takes the values and the step time beyond which a trial is hopeless.
        Raises: ConfigError when the unchanged script does not run.
        """
        first = measure({}, None)
        if first.error:
            goal = "enough updates" if first.losses else "its updates"
            raise ConfigError(
                f"the unchanged script does not reach {goal}: {first.error.rstrip('.')}. Run it directly first."
            )
        if not first.losses:
            raise ConfigError(
                "no loss of the script went through accelerator.backward(), so losses of trials cannot be compared; call "
                "accelerator.backward(loss)."
            )
        self.best = base = Trial({}, first, "as it is")
        self.trials.append(base)
        for knob in self.knobs:
            for values in self._values(knob):
                if why := senseless(values):
                    self.trials.append(Trial(values, TrialOutcome(), f"skipped: {why}"))
                    continue
                if not in_time():
                    self.not_tried.append(values)
                    continue
                limit = None if knob.name == "batch_size" else HOPELESS * self.best.outcome.step_s  # these are slower
                outcome = measure(values, limit)
                self._conclude(knob, values, outcome, base.outcome, lambda: self._repeated(measure))
        if self.best is not base:
            self._confirm(base, self._repeated(measure))
        if self._again is not None and not self._again.error:
            self.trials.append(Trial({}, self._again, "as it is, once more"))

    @property
    def not_tried_words(self) -> list[str]:
        """Values not tried for lack of time: a knob's name, or its values if others of it were tried."""
        left: dict[str, list[str]] = {}
        for values in self.not_tried:
            name = [knob.name for knob in self.knobs if knob.name in values][-1]  # values of later knobs come last
            left.setdefault(name, []).append(str(values[name]))
        num = {knob.name: len(knob.values) for knob in self.knobs}
        return [name if len(some) == num[name] else f"{name} ({', '.join(some)})" for name, some in left.items()]

    def _confirm(self, base: Trial, again: TrialOutcome) -> None:
        """Compare with a second run of the unchanged script: a machine that was busy at first exaggerates speedups."""
        assert self.best is not None, "the baseline comes first"
        if again.error:
            self.unconfirmed = again.error
        elif again.step_s * (1 - WORTH) <= self.best.outcome.step_s:
            self.best = base

    def _repeated(self, measure: Measure) -> TrialOutcome:
        """Return a second run of the unchanged script, measured once."""
        if self._again is None:
            self._again = measure({}, None)
        return self._again

    @property
    def gain(self) -> float:
        """Speedup of the best values over the fastest run of the unchanged script."""
        assert self.best is not None, "the baseline comes first"
        plain = [trial.outcome.step_s for trial in self.trials if not trial.values and not trial.outcome.error]
        return min(plain) / self.best.outcome.step_s if self.best.values else 1.0

    def _values(self, knob: Knob) -> Iterator[Values]:
        for value in knob.values:
            assert self.best is not None, "the baseline comes first"
            if self.best.values.get(knob.name) != value:
                yield together(self.best.values, knob.name, value)

    def _conclude(
        self,
        knob: Knob,
        values: Values,
        outcome: TrialOutcome,
        base: TrialOutcome,
        repeat: Callable[[], TrialOutcome],
    ) -> None:
        """Judge a trial; `repeat` runs the unchanged script a second time."""
        assert self.best is not None, "the baseline comes first"
        apart, bound = difference(base.losses, outcome.losses), knob.tolerance
        best = self.best.outcome
        gains = not outcome.error and not outcome.gave_up and knob.name != "batch_size"
        gains = gains and compared(outcome, best, self.weighs_memory) in TAKEN
        if gains and bound < apart < math.inf:
            bound = max(bound, NOISY * difference(base.losses, repeat().losses))
        if outcome.error:
            verdict = f"failed: {outcome.error}"
        elif outcome.gave_up:
            verdict = "slower, ended early"
        elif "batch_size" in values and knob.name == "batch_size":
            verdict = "another batch size: losses cannot be compared"
        elif apart > bound:
            verdict = f"losses differ by {apart:.1%}, more than {bound:.1%}"
        else:
            verdict = compared(outcome, best, self.weighs_memory)
            if verdict in TAKEN and not knob.allowed:
                verdict = f"{best.step_s / outcome.step_s:.2f} times as fast, not taken: --precision any accepts it"
        trial = Trial(values, outcome, verdict, apart)
        self.trials.append(trial)
        if verdict in TAKEN:
            self.best = trial


TAKEN: Final = frozenset({"faster: taken", "less memory: taken"})
"""Verdicts of trials whose values are taken."""


def compared(outcome: TrialOutcome, best: TrialOutcome, weighs_memory: bool) -> str:
    """Return the verdict on a trial with equal losses: peak memory weighs as much as time, and steps never become slower."""
    faster = outcome.step_s / best.step_s
    if not weighs_memory or max(outcome.peak_bytes, best.peak_bytes) < FEW_BYTES or not best.peak_bytes:
        return "faster: taken" if faster < 1 - WORTH else "not faster"
    smaller = outcome.peak_bytes / best.peak_bytes
    if faster > 1 + WORTH:
        return "not faster"
    if faster * smaller >= 1 - WORTH:
        return f"faster, but with {smaller - 1:.0%} more memory" if faster < 1 - WORTH else "not faster"
    return "faster: taken" if faster < 1 - WORTH else "less memory: taken"


def together(values: Values, name: str, value: Any) -> Values:  # Any: a number, a name or a flag
    """Return `values` with one more value.

    A step that is captured as a whole cannot contain CUDA graphs of the compiler, so its model is compiled without them.
    """
    joined = {**values, name: value}
    if name == "step_graph" and value and values.get("compile") == "cuda graph":
        joined["compile"] = "whole"
    return joined


def senseless(values: Values) -> str:
    """Return the reason why a combination of values is not worth a trial; empty if it is."""
    if values.get("fp8") and not values.get("compile"):
        return "fp8 is slower than bf16 unless the model is compiled, and compiling was not taken"
    if values.get("step_graph") and values.get("compile") == "cuda graph":
        return "the whole step is one CUDA graph already, and the compiler's graphs cannot be nested in it"
    return ""


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative difference between losses of the same updates; infinite if one is NaN."""
    worst = 0.0
    for a, b in zip(one, other, strict=False):
        apart = abs(a - b) / max(abs(a), 1e-6)
        worst = max(worst, apart) if apart == apart else float("inf")
    return worst


def fp8_gain(linears: Sequence[tuple[int, int, int]]) -> float:
    """Return the predicted speedup of compiled linear layers by fp8, from their shapes (rows, inputs, outputs).

    Products take half the time. Scaling and casting inputs, weights and gradients reads and writes 12 bytes for each of their numbers,
    which is what a small product gains. The rates are those of a Hopper GPU, where they predicted 0.95 for GPT-2 medium (measured: 0.94) and
    1.4 for a width of 4096.
    """
    half = sum(6.0 * m * k * n / 690e12 for m, k, n in linears)
    eighth = sum(6.0 * m * k * n / 1190e12 + 12.0 * (m * k + k * n + m * n) / 4e12 for m, k, n in linears)
    return half / eighth if eighth else 1.0


def knobs(machine: TunedMachine, base: TrialOutcome, any_precision: bool = False) -> list[Knob]:
    """Return the knobs that apply to this machine and script, the most promising first."""
    same = SAME if base.precision == "no" else ROUNDED
    workers = tuple(n for n in (1, 2, 4, 8) if n <= machine.cores)
    some = []
    if machine.cuda and base.precision == "no":
        some.append(Knob("mixed_precision", ("bf16",), HALF))
    some.append(Knob("fused", (True,), same, advice="the optimizer with fused=True"))
    if machine.has_compiler or machine.cuda:
        some.append(Knob("compile", _ways(machine, base), same))
        if base.has_fp8 and base.precision in ("no", "bf16") and fp8_gain(base.linears) > FP8_GAIN:
            some.append(Knob("fp8", (True,), HALF, allowed=any_precision))
    if base.vocabulary and _logits(base) > LOGITS * base.peak_bytes and machine.cuda:
        some.append(
            Knob("chunked_loss", (True,), same, advice="hasten.modules.use_chunked_loss(model), before prepare()")
        )
    if machine.cuda and base.whole_step:
        some.append(Knob("step_graph", (True,), same))
    some.append(Knob("num_workers", workers, advice="DataLoader(..., num_workers={})"))
    if base.convolutions:
        some.append(Knob("channels_last", (True,), same, advice="model.to(memory_format=torch.channels_last)"))
    if machine.cuda:
        if base.precision == "no":
            some.append(Knob("tf32", (True,), HALF, advice='torch.set_float32_matmul_precision("high")'))
        some.append(Knob("prefetch", (0, 4)))
    if machine.processes > 1:
        some.append(Knob("bucket_cap_mb", (50, 100), same))
    if base.batch_size:
        some.append(Knob("batch_size", _batches(base.batch_size), advice="DataLoader(..., batch_size={})"))
    if base.block_classes and machine.cuda:
        some.append(Knob("recompute", (True,), same))
    return some


def _ways(machine: TunedMachine, base: TrialOutcome) -> tuple[str, ...]:
    """Return the values of the knob "compile" that may gain."""
    if not machine.cuda:
        return ("regional", "whole")
    blocks = ("regional and loss", "regional") if base.vocabulary else ("regional",)
    return (*blocks, "whole", *(("cuda graph",) if base.step_s <= LAUNCHED_S else ()))


def _logits(base: TrialOutcome) -> int:
    """Return the bytes of the logits in float32."""
    return 4 * base.vocabulary * max((rows for rows, _, _ in base.linears), default=0)


def loss_curves(trials: Sequence[Trial], name: str = "fp8") -> list[str]:
    """Return the losses of each trial with the knob `name`, beside those of the same values without it."""
    lines = []
    for trial in trials:
        if not trial.values.get(name) or not trial.outcome.losses:
            continue
        without = {key: value for key, value in trial.values.items() if key != name}
        other = next((one for one in trials if dict(one.values) == without and one.outcome.losses), trials[0])
        number = min(len(trial.outcome.losses), len(other.outcome.losses))
        shown = sorted({round(index * (number - 1) / 7) for index in range(8)})
        lines.append(f"losses of updates {', '.join(str(index + 1) for index in shown)}:")
        for label, one in ((name, trial), ("without", other)):
            lines.append(f"  {label}: {', '.join(f'{one.outcome.losses[index]:.4f}' for index in shown)}")
    return lines


def check_names(only: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not a knob."""
    if unknown := next((name for name in only if name not in NAMES), None):
        near = get_close_matches(unknown, NAMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}."
        raise ConfigError(f"--only {unknown}: unknown candidate; {hint}")


def chosen(some: Sequence[Knob], only: Sequence[str]) -> list[Knob]:
    """Return the knobs with the given names, in that order; all knobs if no names are given.

    Raises: ConfigError for a knob that does not apply here.
    """
    known = {knob.name: knob for knob in some}
    if missing := next((name for name in only if name not in known), None):
        raise ConfigError(
            f"--only {missing}: it does not apply to this script on this machine, where {', '.join(known)} can be tried; remove it."
        )
    return [known[name] for name in only] or list(some)


def _batches(own: int) -> tuple[int, ...]:
    return (own * 2, own * 4, own * 8)


def config_of(values: Values, base: Config, blocks: tuple[str, ...]) -> Config:
    """Return the settings for a choice of values, as far as there are settings for them."""
    config = base
    if "mixed_precision" in values or values.get("fp8"):
        config = config.replace(mixed_precision="fp8" if values.get("fp8") else values["mixed_precision"])
    if "prefetch" in values:
        config = config.replace(dataloader=config.dataloader.replace(prefetch=values["prefetch"]))
    if values.get("recompute"):
        config = config.replace(recompute=blocks)
    if "bucket_cap_mb" in values:
        config = config.replace(ddp=DistributedDataParallelKwargs(bucket_cap_mb=values["bucket_cap_mb"]))
    if values.get("step_graph"):
        config = config.replace(performance=PerformanceSettings(mode="auto", compile=False))
    if values.get("compile") in WAYS:
        config = config.replace(dynamo=TorchDynamoPlugin(**WAYS[values["compile"]]))
    return config


def advice(values: Values, tried: Sequence[Knob]) -> list[str]:
    """Return the changes of the script for values that are not settings."""
    lines = []
    for knob in tried:
        if knob.advice and knob.name in values:
            lines.append(knob.advice.format(values[knob.name]))
    return lines


def batch_advice(trials: Sequence[Trial]) -> list[str]:
    """Return a line with the largest batch size that ran, and the one with the most samples per second."""
    tried = [trial for trial in trials if "batch_size" in trial.values and not trial.outcome.error]
    if not tried:
        return []
    largest = max(tried, key=lambda trial: trial.outcome.batch_size)
    measured = [trial for trial in [trials[0], *tried] if trial.outcome.samples_per_s]
    fastest = max(measured, key=lambda trial: trial.outcome.samples_per_s)
    return [
        f"batch size {largest.outcome.batch_size} is the largest that ran, {fastest.outcome.batch_size} has the most samples a "
        f"second ({fastest.outcome.samples_per_s:.0f}); a larger batch changes the training, so it is not selected"
    ]


def seconds(text: str) -> float:
    """Return a duration from "90", "90s", "10m" or "1.5h".

    Raises: ConfigError for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text.strip())
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"budget {text!r} is not a duration; write 90s, 10m or 1h.")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"]


_LONGEST: Final = 160
_RAISED: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*)?")
"""Pattern of the line in a traceback that names the exception, as opposed to a frame or an interpreter's note."""
_PREFIX: Final = re.compile(r"^\[[^\]]*\]:? ?")
"""Pattern of the prefix that launchers add to the lines of a rank."""
_WHERE: Final = " Stack trace:"
"""Start of the source location that torch appends to its messages on the same line."""


def happened(error: BaseException) -> str:
    """Return the class of an exception, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return _short(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def in_output(stderr: str, code: int) -> str:
    """Return the cause of exit code `code`: its last traceback's exception, else its last line, else the code."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [_PREFIX.sub("", line) for line in stderr.splitlines()]
    begins = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if begins:
        for line in lines[begins[-1] + 1 :]:
            if line and not line[0].isspace() and _RAISED.fullmatch(line):
                return _short(_unqualified(line))
    said = [line.strip() for line in lines if line.strip()]
    return _short(said[-1]) if said else f"exit code {code}"


def _unqualified(line: str) -> str:
    """Return the line with an unqualified class name, as in `happened`."""
    kind, colon, message = line.partition(":")
    return f"{kind.rpartition('.')[2]}{colon}{message}"


def _short(text: str) -> str:
    """Return the text shortened to whole sentences or words that fit a table."""
    text = text.partition(_WHERE)[0].strip()
    if len(text) <= _LONGEST:
        return text
    sentence = text[:_LONGEST].rfind(". ")
    return text[: sentence + 1] if sentence > 0 else f"{text[:_LONGEST].rpartition(' ')[0] or text[:_LONGEST]} …"
