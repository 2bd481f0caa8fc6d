"""Program of one trial of `hasten tune`: a script's first updates under given values, timed. Run with -m.

The script's Accelerator has the `ScriptTrial` as a part of its run, which changes its arguments and the objects that it prepares (see
`docs/planning.md`), and ends the script after enough updates, so that nothing is evaluated or saved.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten.accelerator.components import Components
from hasten.extensions.planning.plan.targets import run_script
from hasten.extensions.planning.tune.tuning import (
    TrialOutcome,
    describe_error,
    settings_of,
)
from hasten.optim.run_part import Objects, RunPart, in_every_run
from hasten.optim.window import Holder


class Spec(msgspec.Struct):
    """Parameters of a trial."""

    values: dict[str, Any]  # Any: numbers, names and flags
    result: str
    warmup: int
    updates: int


class _TrialDone(BaseException):
    """Raised to leave the script; not an Exception, so that no handler of the script catches it."""


class ScriptTrial(RunPart):
    """The trial inside a running script."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.losses: list[Tensor] = []
        self.marks: list[float] = []
        self.convolutions = False
        self.precision = "no"
        self.captures_step = False
        self.computes_loss = False
        self._overwritten = False
        """True if the compiled model writes its outputs, including the loss, to the same memory in each step."""

    # Any: arguments of an Accelerator
    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the script's arguments of its Accelerator, overridden by this trial's values."""
        without_output = {"log_with": None, "project_dir": None}
        return {**given, **without_output, **settings_of(self.spec.values)}

    def _change_object(
        self, script_object: Any
    ) -> Any:  # Any: an object that the script prepares
        """Return one of the script's objects, modified for this trial."""
        setting_values = self.spec.values
        if isinstance(script_object, nn.Module):
            self.convolutions = any(
                isinstance(submodule, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
                for submodule in script_object.modules()
            )
            output_layer = getattr(
                script_object, "get_output_embeddings", lambda: None
            )()
            self.computes_loss = type(output_layer) is nn.Linear
            if setting_values.get("channels_last"):
                return script_object.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            return script_object
        if isinstance(script_object, DataLoader) and "num_workers" in setting_values:
            script_object.num_workers = setting_values["num_workers"]
            script_object.prefetch_factor = 2
        if isinstance(script_object, Optimizer) and setting_values.get("fused"):
            for group in script_object.param_groups:
                if "fused" in group:
                    group["fused"], group["foreach"] = True, False
        return script_object

    def built(self, run: Components) -> None:
        """Note the facts about the run of an Accelerator."""
        self.precision = run.precision.spec
        self._overwritten = run.accelerator.config.dynamo.makes_cuda_graphs

    def preparing(self, objects: Objects) -> Objects:
        """Return the script's objects, modified for this trial."""
        return tuple(map(self._change_object, objects))

    def capturing(self) -> None:
        """Record that the script captures its whole step."""
        self.captures_step = True

    def loss(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Record a loss before its backward."""
        self.losses.append(
            loss.detach().clone() if self._overwritten else loss.detach()
        )

    def after_update(self, optimizer: Holder, applied: bool) -> None:
        """Record an update; the script ends at the last one."""
        num_updates = len(self.marks)
        if (
            num_updates in (self.spec.warmup, self.spec.warmup + self.spec.updates)
            and torch.cuda.is_available()
        ):
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())
        if num_updates >= self.spec.warmup + self.spec.updates:
            raise _TrialDone

    def outcome(self, error: str = "") -> TrialOutcome:
        """Return the measurements."""
        timed_marks = self.marks[self.spec.warmup :]
        step_s = 0.0
        if len(timed_marks) > 1:
            step_s = (timed_marks[-1] - timed_marks[0]) / (len(timed_marks) - 1)
        if not error and not step_s:
            if self.marks:
                error = (
                    f"it ended after {len(self.marks)} updates, and {self.spec.warmup + self.spec.updates} are needed; train for longer, or "
                    "give fewer --warmup and --updates"
                )
            else:
                error = "it made no update with an Accelerator of hasten's"
        loss_values: list[float] = []
        try:
            loss_values += list(map(float, self.losses))
        # a kernel of the script failed, which surfaces when its result is read
        except RuntimeError as wrong:
            error = error or describe_error(wrong)
        has_cuda = torch.cuda.is_available()
        if has_cuda:
            peak_bytes = torch.cuda.max_memory_allocated()
        else:
            peak_bytes = _peak_resident_bytes()
        return TrialOutcome(
            step_s=step_s,
            peak_bytes=peak_bytes,
            losses=tuple(loss_values),
            convolutions=self.convolutions,
            precision=self.precision,
            captures_step=self.captures_step,
            computes_loss=self.computes_loss,
            error=error,
        )


def _peak_resident_bytes() -> int:
    """Return the peak resident memory of this process."""
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024


def main(argv: list[str]) -> int:
    """Run `spec.json script.py [arguments]` and write the measurements."""
    trial_spec = msgspec.json.decode(Path(argv[0]).read_bytes(), type=Spec)
    script_trial = ScriptTrial(trial_spec)
    if trial_spec.values.get("tf32"):
        torch.set_float32_matmul_precision("high")
    error = ""
    try:
        with in_every_run(script_trial):
            run_script(Path(argv[1]), argv[2:])
    except _TrialDone:
        pass
    except SystemExit as ended:
        error = f"it ended with exit code {ended.code}" if ended.code else ""
    # any kind: the script is the user's, and the table shows what it raised
    except Exception as wrong:
        error = describe_error(wrong)
    Path(trial_spec.result).write_bytes(
        msgspec.json.encode(script_trial.outcome(error))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
