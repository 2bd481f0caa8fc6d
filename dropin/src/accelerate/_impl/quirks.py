"""Habits of Accelerate 1.15 that existing scripts rely on: each with its reason, and a test that names it.

A quirk is kept because its documentation promises it or its users depend on it. What is plainly a defect is not here;
DIFFERENCES.md lists those. A comment "# quirk:" with its name marks the code that a quirk excuses; tests mark what they prove with
its name (tests/test_quirks.py checks both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Quirk:
    """One habit that is kept."""

    name: str
    reason: str


SCHEDULER_TIMES_PROCESSES: Final = Quirk(
    "scheduler steps once per process",
    "A prepared scheduler advances num_processes times per update unless split_batches: documented, and scripts divide "
    "or multiply their step counts by it. hasten itself advances once.",
)
SCHEDULER_COUNTS_MICRO_STEPS: Final = Quirk(
    "adjust_scheduler bumps the step count",
    "Off the boundary a prepared scheduler's _step_count still grows (adjust_scheduler): schedulers that compare it with "
    "a total number of micro-steps end where they are expected to.",
)
ZERO_GRAD_WAITS: Final = Quirk(
    "zero_grad does nothing inside a window",
    "Loops call optimizer.zero_grad() in every micro-step and rely on it being ignored until the window ends.",
)
SINGLETONS: Final = Quirk(
    "states are process-wide",
    "Libraries ask PartialState() and AcceleratorState() anywhere and expect what the first Accelerator settled.",
)
PRECISION_IS_FIXED: Final = Quirk(
    "the second Accelerator may not change the precision",
    "Callers match the ValueError that says that AcceleratorState has already been initialized.",
)
STRANGERS_PASS: Final = Quirk(
    "prepare() lets unknown objects through",
    "Scripts prepare tuples with datasets, functions or numbers among them and get those back as they are.",
)
LAST_BATCH_IS_FULL: Final = Quirk(
    "even_batches fills the last batch to its full size",
    "Scripts count on equal shapes on every rank and step; samples from the beginning of the epoch fill the rest. "
    "hasten itself repeats at most one sample a rank.",
)
LAST_BATCH_IS_CUT: Final = Quirk(
    "gather_for_metrics cuts the last batch by arithmetic",
    "At a loader's last batch every gathered tensor is cut to dataset length modulo global batch size, on one process "
    "too: Trainer gathers a loss repeated to the full batch size and relies on the cut.",
)
STREAMS_ARE_DISPATCHED: Final = Quirk(
    "an IterableDataset is read by the main process",
    "dispatch_batches=None means True for streams: documented, and the only safe guess for streams that cannot be split.",
)
SHUFFLE_FOLLOWS_TORCH: Final = Quirk(
    "shuffling draws from torch's generator",
    "Without use_seedable_sampler the order comes from torch's global generator, or from one seeded by it and made equal "
    "on all ranks each epoch; recorded losses depend on it.",
)
SEEDABLE_ORDER: Final = Quirk(
    "the seedable sampler's order",
    "Epoch e is torch.randperm seeded with data_seed + e (or torch's initial seed): libraries compare losses recorded so.",
)
NESTED_FIRST: Final = Quirk(
    "main_process_first may be nested",
    "Libraries open local_main_process_first inside main_process_first (trl does while it tokenizes): the main rank's "
    "inner block meets the other ranks' outer one. hasten's own blocks name themselves and refuse that.",
)
LOGGER_NEEDS_STATE: Final = Quirk(
    "a logger refuses to speak before there is a state",
    "Tests of other libraries match the RuntimeError, and a message printed by every rank is worse than an error.",
)
GATHER_OBJECT_JOINS: Final = Quirk(
    "gather_object joins what ranks give",
    "With several processes the items of every rank's list are joined; with one, the object comes back as it is.",
)
FLAT_RESULTS: Final = Quirk(
    "gather and reduce leave a single process's tensors alone",
    "On one process the very same object comes back, 0-dim tensors included: scripts call .item() on it.",
)
SCALE_IS_FOR_XLA: Final = Quirk(
    "reduce(scale=...) acts on TPUs only",
    "Documented so; scripts that pass it elsewhere have recorded results without it.",
)
ONE_PROCESS_IS_ALL: Final = Quirk(
    "on_process(process_index=1) runs on one process",
    "A lone process stands for every process a function may be meant for.",
)
LOG_LINES_NAME_THE_RANK: Final = Quirk(
    "log lines begin with [RANK n]",
    "Scripts that merge logs of processes tell them apart by it.",
)
FREE_MEMORY_GIVES_LIST: Final = Quirk(
    "free_memory gives a list",
    "`model, = accelerator.free_memory(model)` unpacks it, so one object gives a list of one None.",
)
AUTOMATIC_NAMING_OPT_IN: Final = Quirk(
    "checkpoints are numbered only when asked",
    "Without automatic_checkpoint_naming save_state() needs a folder and load_state() raises a ValueError callers match.",
)
POSITION_IS_OPT_IN: Final = Quirk(
    "a loader's position is restored only when asked",
    "Scripts that resume in the middle of an epoch call skip_first_batches themselves; restoring the position as well "
    "would skip twice. use_stateful_dataloader=True restores it. The epoch is always restored.",
)
MISSING_TRACKER_IS_BLANK: Final = Quirk(
    "get_tracker gives a blank tracker on other processes",
    "Scripts call methods of the tracker on every rank and rely on nothing happening off the main process.",
)
ESTABLISHED_NAMES: Final = Quirk(
    "checkpoint files keep their names",
    "model.safetensors, optimizer.bin, scheduler.bin, scaler.pt, custom_checkpoint_0.pkl: other tools look for them.",
)

ALL: Final = tuple(value for value in list(globals().values()) if isinstance(value, Quirk))
