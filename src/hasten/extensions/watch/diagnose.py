"""Diagnosis of a stall: a pure function from the states of all ranks to the likely cause. No clock, store or torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final, Literal

from hasten.extensions.watch.state import (
    IDLE_SHARE,
    Cause,
    ObservedRank,
    State,
    Status,
)
from hasten.runtime.nodelist import ranks_in_words


def describe_occupation(rank_state: State) -> tuple[Cause, str, str]:
    """Return the cause, a description of the rank's activity, and a remedy."""
    spot_words = rank_state.spot.describe_line()
    match rank_state.kind:
        case "loader":
            return (
                "data",
                f"waits for its next batch at {spot_words}",
                "check the dataset's slowest samples and the DataLoader's workers (num_workers, prefetch_factor, a worker that "
                "waits for a lock or a download).",
            )
        case "checkpoint":
            return (
                "checkpoint",
                f"is in a save or load at {spot_words} and has read and written nothing for {rank_state.io_quiet_s:.0f} s",
                "the disk or network file system does not respond: check its mount, its quota and `dmesg`.",
            )
        case "compiling":
            return (
                "compiling",
                f"compiles at {spot_words}",
                "increase trust.stall_after_s if compiling takes this long.",
            )
        case "ending":
            return (
                "user code",
                f"is in end_training() at {spot_words}",
                "call end_training() on every rank, and no collective after it; if trackers or background saves take this long, "
                "increase trust.stall_after_s.",
            )
        case "over":
            return (
                "user code",
                "has reached the end of its program, but other threads keep its process alive",
                "let every rank run the same steps and end together; join threads before the program ends, or make them daemons.",
            )
    if rank_state.in_dataset:
        return (
            "data",
            f"is in the dataset's code at {spot_words}, called by its DataLoader",
            "check why this sample takes so long: a lock, a download, an endless loop.",
        )
    return (
        "user code",
        f"is in user code at {spot_words} in {rank_state.function}(), {_activity_words(rank_state)},",
        "an endless loop, a lock, or work on this rank only: do it on all ranks or inside main_process_first(), or increase "
        "trust.stall_after_s if it takes this long.",
    )


def _activity_words(rank_state: State) -> str:
    if rank_state.thread == "disk":
        return "waiting for the disk or for memory that was swapped out"
    if rank_state.cpu_share < IDLE_SHARE and rank_state.thread == "asleep":
        return "asleep"
    return "busy"


WaitEnd = Literal["never", "hardly", "perhaps"]
"""Whether a wait can end: never; hardly, unless a computation still runs; perhaps, because a rank still works."""
_BARRIER_PREFIX: Final = "barrier/"
_SLOW_IO_KINDS: Final = ("checkpoint", "ending")
_TRAINING_KINDS: Final = ("backward", "forward")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The waiting ranks, the missing ranks and the cause."""

    cause: Cause
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    wait_end: WaitEnd
    """Whether the wait can still end without intervention."""
    sentence: str
    cure: str

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that two diagnoses must agree on."""
        return (self.cause, self.waiting, self.missing)


def diagnose_stall(
    observed_ranks: Sequence[ObservedRank], io_patience_s: float = 60.0
) -> Diagnosis | None:
    """Return the cause of a wait; None if no rank waits, or all missing ranks are expected to take long."""
    ranks_by_status: dict[Status, list[ObservedRank]] = defaultdict(list)
    for observed_rank in observed_ranks:
        ranks_by_status[observed_rank.status].append(observed_rank)
    silent_ranks = ranks_by_status.pop("silent", [])
    present_ranks = ranks_by_status.pop("here", [])
    lost_ranks = list(chain(*ranks_by_status.values()))
    present_states = [rank.state for rank in present_ranks if rank.state is not None]
    moving_states = [rank_state for rank_state in present_states if rank_state.moves]
    rank_states = {state.rank: state for state in present_states if not state.moves}
    groups_ahead = _groups_ahead(rank_states)
    waiting_states = []
    working_states = []
    for rank, rank_state in rank_states.items():
        waits_on_device = rank_state.kind == "device" and groups_ahead[rank]
        if rank_state.waits or waits_on_device:
            waiting_states.append(rank_state)
        else:
            working_states.append(rank_state)
    if not waiting_states:
        return None
    waiting_ranks = tuple(rank_state.rank for rank_state in waiting_states)
    is_needed = partial(_is_needed, waiting_states, bool(working_states))
    if needed_ranks := list(filter(is_needed, lost_ranks)):
        return _diagnose_lost(waiting_ranks, needed_ranks)
    if working_states:
        return _diagnose_uneven(
            rank_states, waiting_ranks, groups_ahead, working_states
        ) or _diagnose_working(waiting_ranks, working_states, io_patience_s)
    if silent_ranks:
        return _diagnose_silent(waiting_ranks, silent_ranks)
    if moving_states:
        unblocked_states = [state for state in moving_states if not state.block]
        return _diagnose_moving(waiting_ranks, unblocked_states)
    return _diagnose_all_waiting(rank_states, groups_ahead)


def _groups_ahead(rank_states: Mapping[int, State]) -> dict[int, set[str]]:
    """Return, for each rank, the groups in which it has started a collective that another rank has not."""
    groups_ahead: dict[int, set[str]] = {rank: set() for rank in rank_states}
    for group_name in _group_names(rank_states.values()):
        is_barrier = group_name.startswith(_BARRIER_PREFIX)
        collective_counts = {}
        for rank, rank_state in rank_states.items():
            if is_barrier or group_name in rank_state.counts:
                collective_counts[rank] = rank_state.counts.get(group_name, 0)
        for rank, collective_count in collective_counts.items():
            if collective_count > min(collective_counts.values()):
                groups_ahead[rank].add(group_name)
    return groups_ahead


def _group_names(rank_states: Iterable[State]) -> set[str]:
    return set().union(*(rank_state.counts for rank_state in rank_states))


def _is_needed(
    waiting_ranks: Sequence[State], others_work: bool, observed_rank: ObservedRank
) -> bool:
    """Return whether ranks wait for this one.

    A rank that ended well is missing only in groups in which others have started more collectives than it had. If that is unknown,
    the ranks that are present and still work are considered first.
    """
    if observed_rank.status in ("failed", "stopped"):
        return True
    if observed_rank.note is None or observed_rank.note.counts is None:
        return not others_work
    final_counts = observed_rank.note.counts
    for rank_state in waiting_ranks:
        if rank_state.barrier or _is_ahead(rank_state.counts, final_counts):
            return True
    return False


def _is_ahead(counts: Mapping[str, int], other_counts: Mapping[str, int]) -> bool:
    """Return whether more collectives were started in a group that both counts have."""
    common_groups = counts.keys() & other_counts.keys()
    return any(counts[group] > other_counts[group] for group in common_groups)


def _diagnose_lost(
    waiting_ranks: tuple[int, ...], lost_ranks: Sequence[ObservedRank]
) -> Diagnosis:
    statuses = [observed_rank.status for observed_rank in lost_ranks]
    status = min(statuses, key=("failed", "stopped", "gone", "left").index)
    ranks_of_status = [
        lost_rank for lost_rank in lost_ranks if lost_rank.status == status
    ]
    rank_numbers = tuple(lost_rank.rank for lost_rank in ranks_of_status)
    rank_words = ranks_in_words(rank_numbers)
    notes = [lost_rank.note for lost_rank in ranks_of_status if lost_rank.note]
    end_words = next(filter(None, (note.ended for note in notes)), "")
    match status:
        case "stopped":
            sentence = f"{rank_words} {_is_or_are(rank_numbers)} stopped (SIGSTOP, Ctrl-Z or a debugger)"
            pid = ranks_of_status[0].note.pid if ranks_of_status[0].note else "PID"
            cure = f"resume it with `kill -CONT {pid}`, or find out why it was stopped."
        case "left":
            sentence = f"{rank_words} ended without an error{end_words and f' {end_words}'}, while other ranks still needed it"
            cure = (
                "let every rank run the same steps and end together: no sys.exit, return or break that depends on the rank, and the "
                "same number of batches on every rank (prepare() the loader)."
            )
        case "failed":
            sentence = f"{rank_words} failed{end_words and f': {end_words}'}"
            cure = "fix the error of that rank; the others only waited for it."
        case _:
            sentence = (
                f"the process of {rank_words} has exited without an error message"
            )
            cure = "it was killed or crashed: check its last output, and `dmesg` for the out-of-memory killer."
    return Diagnosis(
        status,  # type: ignore[arg-type]  # one of the four
        waiting_ranks,
        rank_numbers,
        wait_end="never",
        sentence=sentence,
        cure=cure,
    )


def _diagnose_uneven(
    rank_states: Mapping[int, State],
    waiting_ranks: tuple[int, ...],
    groups_ahead: Mapping[int, set[str]],
    working: Sequence[State],
) -> Diagnosis | None:
    """Return a diagnosis if ranks have reached the end of training while others wait for them in a step."""
    ending_states = [state for state in working if state.kind == "ending"]
    training_states = []
    for rank in waiting_ranks:
        if rank_states[rank].kind in _TRAINING_KINDS and groups_ahead[rank]:
            training_states.append(rank_states[rank])
    if not ending_states or not training_states:
        return None
    rank_numbers = tuple(sorted(rank_state.rank for rank_state in ending_states))
    first_ending = min(ending_states, key=lambda rank_state: rank_state.rank)
    first_training = training_states[0]
    return Diagnosis(
        "uneven",
        waiting_ranks,
        rank_numbers,
        wait_end="never",
        sentence=(
            f"{ranks_in_words(rank_numbers)} {_is_or_are(rank_numbers)} in end_training() at {first_ending.spot.describe_line()} after {first_ending.step} updates, while rank "
            f"{first_training.rank} waits at {first_training.spot.describe_line()} for one more: the ranks have unequal numbers of batches"
        ),
        cure=(
            "give every rank the same number of batches (prepare() the loader, or use join_uneven_inputs()), and call "
            "end_training() on every rank after the same update."
        ),
    )


def _diagnose_working(
    waiting_ranks: tuple[int, ...], working: Sequence[State], io_patience_s: float
) -> Diagnosis | None:
    busy_states = []
    for rank_state in working:
        if not _may_take_its_time(rank_state, io_patience_s):
            busy_states.append(rank_state)
    if not busy_states:
        return None
    quietest = max(busy_states, key=lambda rank_state: rank_state.quiet_s)
    cause, activity, remedy = describe_occupation(quietest)
    last_collective = ""
    if quietest.last:
        last_collective = f"; its last collective was {quietest.last.describe_line()}, {quietest.last_ago_s:.0f} s ago"
    busy_ranks = sorted(rank_state.rank for rank_state in busy_states)
    return Diagnosis(
        cause,
        waiting_ranks,
        tuple(busy_ranks),
        wait_end="perhaps",
        sentence=f"rank {quietest.rank} {activity} ({quietest.quiet_s:.0f} s){last_collective}",
        cure=remedy,
    )


def _may_take_its_time(rank_state: State, io_patience_s: float) -> bool:
    """Return whether this rank's delay is expected: in a marked block, or busy with a file or a compilation."""
    if rank_state.kind in _SLOW_IO_KINDS:
        return rank_state.io_quiet_s < io_patience_s
    return bool(rank_state.block) or (
        rank_state.kind == "compiling" and rank_state.quiet_s < 10 * io_patience_s
    )


def _diagnose_silent(
    waiting_ranks: tuple[int, ...], silent: Sequence[ObservedRank]
) -> Diagnosis:
    rank_numbers = tuple(observed_rank.rank for observed_rank in silent)
    notes = [observed_rank.note for observed_rank in silent if observed_rank.note]
    if not notes:
        silence_words = f"{ranks_in_words(rank_numbers)} has not created an Accelerator yet, or its machine has failed"
    else:
        processes = ", ".join(f"pid {note.pid} on {note.host}" for note in notes[:4])
        silence_words = f"{ranks_in_words(rank_numbers)} ({processes}) does not respond: native code that holds the GIL, or a failed machine"
    return Diagnosis(
        "silent",
        waiting_ranks,
        rank_numbers,
        wait_end="perhaps",
        sentence=silence_words,
        cure=(
            "a long regular expression, json, pickle or a C extension may simply take this long; otherwise inspect that process "
            "(`py-spy dump --native --pid PID`, `dmesg`) and the network between the machines."
        ),
    )


def _diagnose_moving(
    waiting_ranks: tuple[int, ...], moving: Sequence[State]
) -> Diagnosis | None:
    """Return a diagnosis of ranks that start other collectives, outside of blocks in which others are meant to wait."""
    if not moving:
        return None
    rank_numbers = tuple(rank_state.rank for rank_state in moving)
    subject = "it has" if len(rank_numbers) == 1 else "they have"
    return Diagnosis(
        "elsewhere",
        waiting_ranks,
        rank_numbers,
        wait_end="perhaps",
        sentence=(
            f"{ranks_in_words(rank_numbers)} {_is_or_are(rank_numbers)} busy with other collectives, now at {moving[0].spot.describe_line()}, while others wait in one "
            f"that {subject} not started"
        ),
        cure=(
            "make the same calls in the same order on every rank of a group; if only some ranks have work, use main_process_first(), or "
            "increase trust.stall_after_s if it takes this long."
        ),
    )


def _diagnose_all_waiting(
    rank_states: Mapping[int, State], groups_ahead: Mapping[int, set[str]]
) -> Diagnosis:
    """Return the diagnosis if every rank waits: for each other in different calls, or all in the same call."""
    ranks_by_place: dict[tuple[str, str], list[int]] = {}
    # then the same call from different lines is one collective
    is_even = not any(groups_ahead.values())
    for rank, rank_state in rank_states.items():
        site = "" if is_even else rank_state.spot.site
        ranks_by_place.setdefault((site, rank_state.spot.call), []).append(rank)
    all_ranks = tuple(sorted(rank_states))
    if len(ranks_by_place) == 1:
        return _diagnose_same_call(rank_states, all_ranks)
    rank_groups = sorted(
        ranks_by_place.values(),
        key=lambda rank_numbers: (-len(rank_numbers), rank_numbers[0]),
    )
    first_state = rank_states[rank_groups[0][0]]
    other_state = rank_states[rank_groups[1][0]]
    step_difference = ""
    least_advanced = min(rank_states.values(), key=lambda rank_state: rank_state.step)
    most_advanced = max(rank_states.values(), key=lambda rank_state: rank_state.step)
    if least_advanced.step < most_advanced.step:
        step_difference = f"; rank {least_advanced.rank} has made {least_advanced.step} updates and rank {most_advanced.rank} {most_advanced.step}"
    return Diagnosis(
        "other call",
        all_ranks,
        (),
        wait_end=_find_end_of_wait(rank_states, groups_ahead),
        sentence=(
            f"{ranks_in_words(rank_groups[0])} waits at {first_state.spot.describe_line()} while {ranks_in_words(rank_groups[1])} waits at "
            f"{other_state.spot.describe_line()}: the ranks called different collectives{step_difference}"
        ),
        cure=(
            "every rank must make the same calls in the same order: move the call out of `if is_main_process:` and other "
            "branches that depend on the rank, and give all ranks the same number of batches (prepare() the loader)."
        ),
    )


def _diagnose_same_call(
    rank_states: Mapping[int, State], all_ranks: tuple[int, ...]
) -> Diagnosis:
    first_state = rank_states[all_ranks[0]]
    return Diagnosis(
        "same call",
        all_ranks,
        (),
        wait_end="perhaps",
        sentence=f"all ranks wait in the same call, {first_state.spot.describe_line()}: data is not transferred",
        cure=(
            "a slow or broken network, or a firewall between the machines (try `hasten test`, NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME); "
            "increase trust.stall_after_s if the transfer is that large."
        ),
    )


def _find_end_of_wait(
    rank_states: Mapping[int, State], groups_ahead: Mapping[int, set[str]]
) -> WaitEnd:
    """Return whether a wait of ranks in different calls can end."""
    for rank, rank_state in rank_states.items():
        # a device computes without the CPU, and a step may still reach the collective of the others
        may_continue = rank_state.kind == "device" or (
            rank_state.kind in _TRAINING_KINDS and _is_behind(rank_state, rank_states)
        )
        if may_continue and not groups_ahead[rank]:
            return "perhaps"
    return "never" if _is_deadlock(rank_states, groups_ahead) else "hardly"


def _is_behind(rank_state: State, rank_states: Mapping[int, State]) -> bool:
    """Return whether another rank has started a collective of a common group that this one has not."""
    group_names = set(filter(_is_collective, rank_state.counts))
    counts = {group_name: rank_state.counts[group_name] for group_name in group_names}
    return any(_is_ahead(state.counts, counts) for state in rank_states.values())


def _is_collective(group_name: str) -> bool:
    return not group_name.startswith(_BARRIER_PREFIX)


def _is_deadlock(
    rank_states: Mapping[int, State], groups_ahead: Mapping[int, set[str]]
) -> bool:
    """Return whether ranks in different calls are deadlocked: no rank is still receiving data that another has sent."""
    group_ranks = []
    for rank, rank_state in rank_states.items():
        if rank_state.barrier:
            continue
        if rank_state.kind != "collective" and not groups_ahead[rank]:
            return False  # a backward may still be computing
        group_ranks.append(rank)
    if not group_ranks:
        return True
    if len(group_ranks) < len(rank_states):
        return all(any(map(_is_collective, groups_ahead[rank])) for rank in group_ranks)
    groups = set(filter(_is_collective, _group_names(rank_states.values())))
    if len(groups) > 1:
        return all(groups_ahead[rank] for rank in group_ranks)
    (group_name,) = groups
    # a rank behind may still receive data
    counts = [rank_states[rank].counts.get(group_name, 0) for rank in group_ranks]
    return len(set(counts)) == 1


def _is_or_are(rank_numbers: Sequence[int]) -> str:
    return "is" if len(rank_numbers) == 1 else "are"
