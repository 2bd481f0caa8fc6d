"""Diagnosis of a stall: a pure function from the states of all ranks to the likely cause. No clock, store or torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hasten.extensions.watch.state import IDLE_SHARE, Cause, ObservedRank, State
from hasten.runtime.nodelist import ranks_in_words


def describe_occupation(rank_state: State) -> tuple[Cause, str, str]:
    """Return the cause, a description of the rank's activity, and a remedy."""
    spot_words = rank_state.spot.words()
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
    present_states = {
        observed_rank.rank: observed_rank.state
        for observed_rank in observed_ranks
        if observed_rank.status == "here" and observed_rank.state is not None
    }
    rank_states = {
        rank: rank_state
        for rank, rank_state in present_states.items()
        if not rank_state.moves
    }
    groups_ahead = _groups_ahead(rank_states)
    waiting_ranks = tuple(
        rank
        for rank, rank_state in rank_states.items()
        if rank_state.waits or (groups_ahead[rank] and rank_state.kind == "device")
    )
    if not waiting_ranks:
        return None
    lost_ranks = [
        observed_rank
        for observed_rank in observed_ranks
        if observed_rank.status in ("left", "failed", "gone", "stopped")
    ]
    working_states = [
        rank_state
        for rank, rank_state in rank_states.items()
        if rank not in waiting_ranks
    ]
    if needed_ranks := [
        observed_rank
        for observed_rank in lost_ranks
        if _is_needed(
            observed_rank,
            [rank_states[rank] for rank in waiting_ranks],
            bool(working_states),
        )
    ]:
        return _diagnose_lost(waiting_ranks, needed_ranks)
    silent_ranks = [
        observed_rank
        for observed_rank in observed_ranks
        if observed_rank.status == "silent"
    ]
    if working_states:
        return _diagnose_uneven(
            rank_states, waiting_ranks, groups_ahead, working_states
        ) or _diagnose_working(waiting_ranks, working_states, io_patience_s)
    if silent_ranks:
        return _diagnose_silent(waiting_ranks, silent_ranks)
    if moving_states := [
        rank_state for rank_state in present_states.values() if rank_state.moves
    ]:
        return _diagnose_moving(
            waiting_ranks,
            [rank_state for rank_state in moving_states if not rank_state.block],
        )
    return _diagnose_all_waiting(rank_states, groups_ahead)


def _groups_ahead(rank_states: Mapping[int, State]) -> dict[int, set[str]]:
    """Return, for each rank, the groups in which it has started a collective that another rank has not."""
    groups_ahead: dict[int, set[str]] = {rank: set() for rank in rank_states}
    for group_name in {
        group_name
        for rank_state in rank_states.values()
        for group_name in rank_state.counts
    }:
        collective_counts = {
            rank: rank_state.counts[group_name]
            for rank, rank_state in rank_states.items()
            if group_name in rank_state.counts
        }
        if group_name.startswith(_BARRIER_PREFIX):
            collective_counts = {
                rank: rank_state.counts.get(group_name, 0)
                for rank, rank_state in rank_states.items()
            }
        for rank, collective_count in collective_counts.items():
            if collective_count > min(collective_counts.values()):
                groups_ahead[rank].add(group_name)
    return groups_ahead


def _is_needed(
    observed_rank: ObservedRank, waiting_ranks: Sequence[State], others_work: bool
) -> bool:
    """Return whether ranks wait for this one.

    A rank that ended well is missing only in groups in which others have started more collectives than it had. If that is unknown,
    the ranks that are present and still work are considered first.
    """
    if observed_rank.status in ("failed", "stopped"):
        return True
    if observed_rank.note is None or observed_rank.note.counts is None:
        return not others_work
    collective_counts = observed_rank.note.counts
    return any(
        rank_state.barrier
        or any(
            group_name in collective_counts
            and collective_count > collective_counts[group_name]
            for group_name, collective_count in rank_state.counts.items()
        )
        for rank_state in waiting_ranks
    )


def _diagnose_lost(
    waiting_ranks: tuple[int, ...], lost_ranks: Sequence[ObservedRank]
) -> Diagnosis:
    status = next(
        status
        for status in ("failed", "stopped", "gone", "left")
        if any(observed_rank.status == status for observed_rank in lost_ranks)
    )
    lost_alike = [
        observed_rank for observed_rank in lost_ranks if observed_rank.status == status
    ]
    rank_numbers = tuple(observed_rank.rank for observed_rank in lost_alike)
    rank_words = ranks_in_words(rank_numbers)
    end_words = next(
        (
            observed_rank.note.ended
            for observed_rank in lost_alike
            if observed_rank.note is not None and observed_rank.note.ended
        ),
        "",
    )
    match status:
        case "stopped":
            sentence = f"{rank_words} {_is_or_are(rank_numbers)} stopped (SIGSTOP, Ctrl-Z or a debugger)"
            cure = f"resume it with `kill -CONT {lost_alike[0].note.pid if lost_alike[0].note else 'PID'}`, or find out why it was stopped."
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
    ending_states = [
        rank_state for rank_state in working if rank_state.kind == "ending"
    ]
    training_states = [
        rank_states[rank]
        for rank in waiting_ranks
        if rank_states[rank].kind in _TRAINING_KINDS and groups_ahead[rank]
    ]
    if not ending_states or not training_states:
        return None
    rank_numbers = tuple(sorted(rank_state.rank for rank_state in ending_states))
    first_ending, first_training = (
        min(ending_states, key=lambda rank_state: rank_state.rank),
        training_states[0],
    )
    return Diagnosis(
        "uneven",
        waiting_ranks,
        rank_numbers,
        wait_end="never",
        sentence=(
            f"{ranks_in_words(rank_numbers)} {_is_or_are(rank_numbers)} in end_training() at {first_ending.spot.words()} after {first_ending.step} updates, while rank "
            f"{first_training.rank} waits at {first_training.spot.words()} for one more: the ranks have unequal numbers of batches"
        ),
        cure=(
            "give every rank the same number of batches (prepare() the loader, or use join_uneven_inputs()), and call "
            "end_training() on every rank after the same update."
        ),
    )


def _diagnose_working(
    waiting_ranks: tuple[int, ...], working: Sequence[State], io_patience_s: float
) -> Diagnosis | None:
    busy_states = [
        rank_state
        for rank_state in working
        if not _may_take_its_time(rank_state, io_patience_s)
    ]
    if not busy_states:
        return None
    rank_state = max(busy_states, key=lambda rank_state: rank_state.quiet_s)
    cause, activity, remedy = describe_occupation(rank_state)
    if rank_state.last:
        last_collective = f"; its last collective was {rank_state.last.words()}, {rank_state.last_ago_s:.0f} s ago"
    else:
        last_collective = ""
    return Diagnosis(
        cause,
        waiting_ranks,
        tuple(sorted(rank_state.rank for rank_state in busy_states)),
        wait_end="perhaps",
        sentence=f"rank {rank_state.rank} {activity} ({rank_state.quiet_s:.0f} s){last_collective}",
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
    process_words = ", ".join(
        f"pid {observed_rank.note.pid} on {observed_rank.note.host}"
        for observed_rank in silent[:4]
        if observed_rank.note is not None
    )
    if all(observed_rank.note is None for observed_rank in silent):
        silence_words = f"{ranks_in_words(rank_numbers)} has not created an Accelerator yet, or its machine has failed"
    else:
        silence_words = f"{ranks_in_words(rank_numbers)} ({process_words}) does not respond: native code that holds the GIL, or a failed machine"
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
    return Diagnosis(
        "elsewhere",
        waiting_ranks,
        rank_numbers,
        wait_end="perhaps",
        sentence=(
            f"{ranks_in_words(rank_numbers)} {_is_or_are(rank_numbers)} busy with other collectives, now at {moving[0].spot.words()}, while others wait in one "
            f"that {'it has' if len(rank_numbers) == 1 else 'they have'} not started"
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
        ranks_by_place.setdefault(
            ("" if is_even else rank_state.spot.site, rank_state.spot.call), []
        ).append(rank)
    all_ranks = tuple(sorted(rank_states))
    if len(ranks_by_place) == 1:
        return _diagnose_same_call(rank_states, all_ranks)
    rank_groups = sorted(
        ranks_by_place.values(),
        key=lambda rank_numbers: (-len(rank_numbers), rank_numbers[0]),
    )
    first_state, other_state = (
        rank_states[rank_groups[0][0]],
        rank_states[rank_groups[1][0]],
    )
    step_difference = ""
    if len({rank_state.step for rank_state in rank_states.values()}) > 1:
        least_advanced, most_advanced = (
            pick(rank_states.values(), key=lambda rank_state: rank_state.step)
            for pick in (min, max)
        )
        step_difference = f"; rank {least_advanced.rank} has made {least_advanced.step} updates and rank {most_advanced.rank} {most_advanced.step}"
    return Diagnosis(
        "other call",
        all_ranks,
        (),
        wait_end=_wait_ends(rank_states, groups_ahead),
        sentence=(
            f"{ranks_in_words(rank_groups[0])} waits at {first_state.spot.words()} while {ranks_in_words(rank_groups[1])} waits at "
            f"{other_state.spot.words()}: the ranks called different collectives{step_difference}"
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
        sentence=f"all ranks wait in the same call, {first_state.spot.words()}: data is not transferred",
        cure=(
            "a slow or broken network, or a firewall between the machines (try `hasten test`, NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME); "
            "increase trust.stall_after_s if the transfer is that large."
        ),
    )


def _wait_ends(
    rank_states: Mapping[int, State], groups_ahead: Mapping[int, set[str]]
) -> WaitEnd:
    """Return whether a wait of ranks in different calls can end."""
    if any(
        not groups_ahead[rank]
        and (
            rank_state.kind == "device"
            or (
                rank_state.kind in _TRAINING_KINDS
                and _is_behind(rank_state, rank_states)
            )
        )
        for rank, rank_state in rank_states.items()
    ):
        # a device computes without the CPU, and a step may still reach the collective of the others
        return "perhaps"
    return "never" if _is_deadlock(rank_states, groups_ahead) else "hardly"


def _is_behind(rank_state: State, rank_states: Mapping[int, State]) -> bool:
    """Return whether another rank has started a collective of a common group that this one has not."""
    return any(
        other_rank_state.counts.get(group_name, 0) > collective_count
        for other_rank_state in rank_states.values()
        for group_name, collective_count in rank_state.counts.items()
        if not group_name.startswith(_BARRIER_PREFIX)
    )


def _is_deadlock(
    rank_states: Mapping[int, State], groups_ahead: Mapping[int, set[str]]
) -> bool:
    """Return whether ranks in different calls are deadlocked: no rank is still receiving data that another has sent."""
    barrier_ranks = [
        rank for rank, rank_state in rank_states.items() if rank_state.barrier
    ]
    group_ranks = [rank for rank in rank_states if rank not in barrier_ranks]
    if any(
        rank_states[rank].kind != "collective" and not groups_ahead[rank]
        for rank in group_ranks
    ):
        return False  # a backward may still be computing
    if not group_ranks:
        return True
    if barrier_ranks:
        return all(
            any(
                not group_name.startswith(_BARRIER_PREFIX)
                for group_name in groups_ahead[rank]
            )
            for rank in group_ranks
        )
    groups = {
        group_name
        for rank_state in rank_states.values()
        for group_name in rank_state.counts
        if not group_name.startswith(_BARRIER_PREFIX)
    }
    if len(groups) > 1:
        return all(groups_ahead[rank] for rank in group_ranks)
    (group_name,) = groups
    # a rank behind may still receive data
    return (
        len({rank_states[rank].counts.get(group_name, 0) for rank in group_ranks}) == 1
    )


def _is_or_are(rank_numbers: Sequence[int]) -> str:
    return "is" if len(rank_numbers) == 1 else "are"
