"""The one ambient context of a process, of which the states are views: existing scripts ask for process-wide state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from accelerate._impl.pickled import PICKLE
from accelerate._impl.surface.shown import shown_property
from hasten.accelerator.process import Process, take_share
from hasten.optim.clock import StepClock
from hasten.runtime import bootstrap, env
from hasten.runtime.bootstrap import GroupSettings
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import choose_device
from hasten.runtime.topology import Topology

# Any in this file: attributes of the states, the user's functions, and inputs that are dealt out.


class EstablishedProcess(Process):
    """hasten's Process with the established habits: blocks may be nested, and a lone process stands for every other."""

    @contextmanager
    def _run_first(self, first: bool, block_name: str) -> Iterator[None]:
        """A block that some ranks run first; their errors are raised on all, and blocks may be nested. Ranks: every rank."""
        # quirk: NESTED_FIRST
        if not first:
            self._meet_and_vote(None, "process_first")
        error: Exception | None = None
        try:
            yield
        # any error of the user's block has to reach the other ranks; it is re-raised
        except Exception as caught:
            if not first:
                raise
            error = caught
        if first:
            self._meet_and_vote(error, "process_first")

    num_processes = shown_property(
        lambda self: AMBIENT.partial.get("num_processes", self.ctx.topology.world_size),
        "",
    )
    process_index = shown_property(
        lambda self: AMBIENT.partial.get("process_index", self.ctx.topology.rank), ""
    )
    local_process_index = shown_property(
        lambda self: AMBIENT.partial.get(
            "local_process_index", self.ctx.topology.local_rank
        ),
        "The rank on the node.",
    )

    def _run_only_where(  # type: ignore[override]  # of this process
        self, is_selected: Callable[[], bool], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        # quirk: ONE_PROCESS_IS_ALL
        if self.num_processes == 1:
            return function
        return Process._run_only_where(is_selected, function)

    @contextmanager
    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> Iterator[Any]:
        """This process's share of a list, tuple, dict of those, tensor or dataset; a lone process has all of it as it is."""
        rank = self.process_index
        count = self.num_processes
        if (
            count > 1
            and isinstance(inputs, dict)
            and len(set(map(len, inputs.values()))) > 1
        ):
            raise ValueError("All values in the dictionary must have the same length")
        yield (
            inputs
            if count == 1 or isinstance(inputs, str)
            else take_share(inputs, rank, count, apply_padding)
        )


@dataclass(slots=True)
class Ambient:
    """The context, helpers and clock of this process; the latest Accelerator replaces an earlier one's."""

    # the attributes of PartialState
    partial: dict[str, Any] = field(default_factory=dict)
    # the attributes of AcceleratorState
    whole: dict[str, Any] = field(default_factory=dict)
    context: ProcessContext | None = None
    process: EstablishedProcess | None = None
    clock: StepClock | None = None
    # loaders being iterated, innermost last
    loaders: list[Any] = field(default_factory=list)
    # the attributes of GradientState that are stored
    gradient: dict[str, Any] = field(default_factory=dict)
    # whether loaders of processes are compared: in those that a notebook has started
    compares_data: bool = False


AMBIENT: Ambient = Ambient()  # quirk: SINGLETONS


def stands_in(device_name: str | None) -> bool:
    """Return True if no accelerator is available, but torch accepts `wanted`: tests replace `set_device` of a device they lack."""
    device = torch.device(device_name or "cpu")
    if device.type == "cpu" or torch.accelerator.is_available():
        return False
    try:
        torch.get_device_module(device).set_device(device)
    # torch was built without it, or finds none
    except (AssertionError, AttributeError, RuntimeError, ValueError):
        return False
    return True


def start(cpu: bool = False, settings: GroupSettings | None = None) -> ProcessContext:
    if AMBIENT.context is None:
        variables = env.snapshot()
        topology = Topology.from_env(variables)
        wants_cpu = cpu or env.read_flag(variables, "ACCELERATE_USE_CPU")
        assigned_device = env.assigned_device(variables)
        device = choose_device(
            topology.local_rank,
            wants_cpu,
            None if stands_in(assigned_device) else assigned_device,
        )
        group_settings = settings or GroupSettings()
        adopt_context(
            bootstrap.start(
                topology, device, settings=replace(group_settings, codec=PICKLE)
            )
        )
    assert AMBIENT.context is not None, "the context was just adopted"
    return AMBIENT.context


def adopt_context(context: ProcessContext) -> None:
    AMBIENT.context = context
    AMBIENT.process = EstablishedProcess(context)


def process() -> EstablishedProcess:
    if AMBIENT.process is None:
        start()
    assert AMBIENT.process is not None, "starting adopts a process"
    return AMBIENT.process


def run_clock() -> StepClock:
    if AMBIENT.clock is None:
        AMBIENT.clock = StepClock()
    return AMBIENT.clock


def device() -> torch.device:
    return start().device


def forget_process() -> None:
    AMBIENT.partial.clear()
    AMBIENT.context = AMBIENT.process = None


def forget_loader(loader: object) -> None:
    """Take a loader off those being iterated, the innermost where it is there twice."""
    positions = []
    for index, active_loader in enumerate(AMBIENT.loaders):
        if active_loader is loader:
            positions.append(index)
    if positions:
        del AMBIENT.loaders[positions[-1]]
