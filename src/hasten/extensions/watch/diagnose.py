"""Diagnosis of a stall: a pure function from the states of all ranks to the likely cause. No clock, store or torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hasten.extensions.watch.state import IDLE_SHARE, Cause, SeenState, State
from hasten.runtime.nodelist import ranks_in_words


def describe_occupation(state: State) -> tuple[Cause, str, str]:
    """Return the cause, a description of the rank's activity, and a remedy."""
    place = state.spot.words()
    match state.kind:
        case "loader":
            return (
                "data",
                f"waits for its next batch at {place}",
                "check the dataset's slowest samples and the DataLoader's workers (num_workers, prefetch_factor, a worker that "
                "waits for a lock or a download).",
            )
        case "checkpoint":
            return (
                "checkpoint",
                f"is in a save or load at {place} and has read and written nothing for {state.io_quiet_s:.0f} s",
                "the disk or network file system does not respond: check its mount, its quota and `dmesg`.",
            )
        case "compiling":
            return (
                "compiling",
                f"compiles at {place}",
                "increase trust.stall_after_s if compiling takes this long.",
            )
        case "ending":
            return (
                "user code",
                f"is in end_training() at {place}",
                "call end_training() on every rank, and no collective after it; if trackers or background saves take this long, "
                "increase trust.stall_after_s.",
            )
        case "over":
            return (
                "user code",
                "has reached the end of its program, but other threads keep its process alive",
                "let every rank run the same steps and end together; join threads before the program ends, or make them daemons.",
            )
    if state.in_dataset:
        return (
            "data",
            f"is in the dataset's code at {place}, called by its DataLoader",
            "check why this sample takes so long: a lock, a download, an endless loop.",
        )
    return (
        "user code",
        f"is in user code at {place} in {state.function}(), {_activity_words(state)},",
        "an endless loop, a lock, or work on this rank only: do it on all ranks or inside main_process_first(), or increase "
        "trust.stall_after_s if it takes this long.",
    )


def _activity_words(state: State) -> str:
    if state.thread == "disk":
        return "waiting for the disk or for memory that was swapped out"
    return (
        "asleep"
        if state.cpu_share < IDLE_SHARE and state.thread == "asleep"
        else "busy"
    )


Ends = Literal["never", "hardly", "perhaps"]
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
    ends: Ends
    """Whether the wait can still end without intervention."""
    sentence: str
    cure: str

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that two diagnoses must agree on."""
        return (self.cause, self.waiting, self.missing)


def diagnose(
    world: Sequence[SeenState], io_patience_s: float = 60.0
) -> Diagnosis | None:
    """Return the cause of a wait; None if no rank waits, or all missing ranks are expected to take long."""
    present_states = {
        seen.rank: seen.state
        for seen in world
        if seen.status == "here" and seen.state is not None
    }
    states = {rank: state for rank, state in present_states.items() if not state.moves}
    groups_ahead = _groups_ahead(states)
    waiting_ranks = tuple(
        rank
        for rank, state in states.items()
        if state.waits or (groups_ahead[rank] and state.kind == "device")
    )
    if not waiting_ranks:
        return None
    lost_ranks = [
        seen for seen in world if seen.status in ("left", "failed", "gone", "stopped")
    ]
    working_states = [
        state for rank, state in states.items() if rank not in waiting_ranks
    ]
    if needed_ranks := [
        seen
        for seen in lost_ranks
        if _is_needed(
            seen, [states[rank] for rank in waiting_ranks], bool(working_states)
        )
    ]:
        return _diagnose_lost(waiting_ranks, needed_ranks)
    silent_ranks = [seen for seen in world if seen.status == "silent"]
    if working_states:
        return _diagnose_uneven(
            states, waiting_ranks, groups_ahead, working_states
        ) or _diagnose_working(waiting_ranks, working_states, io_patience_s)
    if silent_ranks:
        return _diagnose_silent(waiting_ranks, silent_ranks)
    if moving_states := [state for state in present_states.values() if state.moves]:
        return _diagnose_moving(
            waiting_ranks, [state for state in moving_states if not state.block]
        )
    return _diagnose_all_waiting(states, groups_ahead)


def _groups_ahead(states: Mapping[int, State]) -> dict[int, set[str]]:
    """Return, for each rank, the groups in which it has started a collective that another rank has not."""
    groups_ahead: dict[int, set[str]] = {rank: set() for rank in states}
    for group in {group for state in states.values() for group in state.counts}:
        counts = {
            rank: state.counts[group]
            for rank, state in states.items()
            if group in state.counts
        }
        if group.startswith(_BARRIER_PREFIX):
            counts = {
                rank: state.counts.get(group, 0) for rank, state in states.items()
            }
        for rank, count in counts.items():
            if count > min(counts.values()):
                groups_ahead[rank].add(group)
    return groups_ahead


def _is_needed(seen: SeenState, waiting: Sequence[State], others_work: bool) -> bool:
    """Return whether ranks wait for this one.

    A rank that ended well is missing only in groups in which others have started more collectives than it had. If that is unknown,
    the ranks that are present and still work are considered first.
    """
    if seen.status in ("failed", "stopped"):
        return True
    if seen.note is None or seen.note.counts is None:
        return not others_work
    counts = seen.note.counts
    return any(
        state.barrier
        or any(
            group in counts and count > counts[group]
            for group, count in state.counts.items()
        )
        for state in waiting
    )


def _diagnose_lost(
    waiting: tuple[int, ...], lost_ranks: Sequence[SeenState]
) -> Diagnosis:
    status = next(
        status
        for status in ("failed", "stopped", "gone", "left")
        if any(seen.status == status for seen in lost_ranks)
    )
    lost_alike = [seen for seen in lost_ranks if seen.status == status]
    ranks = tuple(seen.rank for seen in lost_alike)
    rank_words = ranks_in_words(ranks)
    end_words = next(
        (
            seen.note.ended
            for seen in lost_alike
            if seen.note is not None and seen.note.ended
        ),
        "",
    )
    match status:
        case "stopped":
            sentence = f"{rank_words} {_is_or_are(ranks)} stopped (SIGSTOP, Ctrl-Z or a debugger)"
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
    return Diagnosis(status, waiting, ranks, ends="never", sentence=sentence, cure=cure)  # type: ignore[arg-type]  # one of the four


def _diagnose_uneven(
    states: Mapping[int, State],
    waiting: tuple[int, ...],
    ahead: Mapping[int, set[str]],
    working: Sequence[State],
) -> Diagnosis | None:
    """Return a diagnosis if ranks have reached the end of training while others wait for them in a step."""
    ending_states = [state for state in working if state.kind == "ending"]
    training_states = [
        states[rank]
        for rank in waiting
        if states[rank].kind in _TRAINING_KINDS and ahead[rank]
    ]
    if not ending_states or not training_states:
        return None
    ranks = tuple(sorted(state.rank for state in ending_states))
    first_ending, first_training = (
        min(ending_states, key=lambda state: state.rank),
        training_states[0],
    )
    return Diagnosis(
        "uneven",
        waiting,
        ranks,
        ends="never",
        sentence=(
            f"{ranks_in_words(ranks)} {_is_or_are(ranks)} in end_training() at {first_ending.spot.words()} after {first_ending.step} updates, while rank "
            f"{first_training.rank} waits at {first_training.spot.words()} for one more: the ranks have unequal numbers of batches"
        ),
        cure=(
            "give every rank the same number of batches (prepare() the loader, or use join_uneven_inputs()), and call "
            "end_training() on every rank after the same update."
        ),
    )


def _diagnose_working(
    waiting: tuple[int, ...], working: Sequence[State], io_patience_s: float
) -> Diagnosis | None:
    busy_states = [
        state for state in working if not _may_take_its_time(state, io_patience_s)
    ]
    if not busy_states:
        return None
    state = max(busy_states, key=lambda state: state.quiet_s)
    cause, activity, remedy = describe_occupation(state)
    last_collective = (
        f"; its last collective was {state.last.words()}, {state.last_ago_s:.0f} s ago"
        if state.last
        else ""
    )
    return Diagnosis(
        cause,
        waiting,
        tuple(sorted(state.rank for state in busy_states)),
        ends="perhaps",
        sentence=f"rank {state.rank} {activity} ({state.quiet_s:.0f} s){last_collective}",
        cure=remedy,
    )


def _may_take_its_time(state: State, io_patience_s: float) -> bool:
    """Return whether this rank's delay is expected: in a marked block, or busy with a file or a compilation."""
    if state.kind in _SLOW_IO_KINDS:
        return state.io_quiet_s < io_patience_s
    return bool(state.block) or (
        state.kind == "compiling" and state.quiet_s < 10 * io_patience_s
    )


def _diagnose_silent(
    waiting: tuple[int, ...], silent: Sequence[SeenState]
) -> Diagnosis:
    ranks = tuple(seen.rank for seen in silent)
    pids = ", ".join(
        f"pid {seen.note.pid} on {seen.note.host}"
        for seen in silent[:4]
        if seen.note is not None
    )
    if all(seen.note is None for seen in silent):
        words = f"{ranks_in_words(ranks)} has not created an Accelerator yet, or its machine has failed"
    else:
        words = f"{ranks_in_words(ranks)} ({pids}) does not respond: native code that holds the GIL, or a failed machine"
    return Diagnosis(
        "silent",
        waiting,
        ranks,
        ends="perhaps",
        sentence=words,
        cure=(
            "a long regular expression, json, pickle or a C extension may simply take this long; otherwise inspect that process "
            "(`py-spy dump --native --pid PID`, `dmesg`) and the network between the machines."
        ),
    )


def _diagnose_moving(
    waiting: tuple[int, ...], moving: Sequence[State]
) -> Diagnosis | None:
    """Return a diagnosis of ranks that start other collectives, outside of blocks in which others are meant to wait."""
    if not moving:
        return None
    ranks = tuple(state.rank for state in moving)
    return Diagnosis(
        "elsewhere",
        waiting,
        ranks,
        ends="perhaps",
        sentence=(
            f"{ranks_in_words(ranks)} {_is_or_are(ranks)} busy with other collectives, now at {moving[0].spot.words()}, while others wait in one "
            f"that {'it has' if len(ranks) == 1 else 'they have'} not started"
        ),
        cure=(
            "make the same calls in the same order on every rank of a group; if only some ranks have work, use main_process_first(), or "
            "increase trust.stall_after_s if it takes this long."
        ),
    )


def _diagnose_all_waiting(
    states: Mapping[int, State], ahead: Mapping[int, set[str]]
) -> Diagnosis:
    """Return the diagnosis if every rank waits: for each other in different calls, or all in the same call."""
    ranks_by_place: dict[tuple[str, str], list[int]] = {}
    # then the same call from different lines is one collective
    is_even = not any(ahead.values())
    for rank, state in states.items():
        ranks_by_place.setdefault(
            ("" if is_even else state.spot.site, state.spot.call), []
        ).append(rank)
    all_ranks = tuple(sorted(states))
    if len(ranks_by_place) == 1:
        return _diagnose_same_call(states, all_ranks)
    rank_groups = sorted(
        ranks_by_place.values(), key=lambda ranks: (-len(ranks), ranks[0])
    )
    first_state, other_state = states[rank_groups[0][0]], states[rank_groups[1][0]]
    uneven = ""
    if len({state.step for state in states.values()}) > 1:
        fewest, most = (
            pick(states.values(), key=lambda state: state.step) for pick in (min, max)
        )
        uneven = f"; rank {fewest.rank} has made {fewest.step} updates and rank {most.rank} {most.step}"
    return Diagnosis(
        "other call",
        all_ranks,
        (),
        ends=_wait_ends(states, ahead),
        sentence=(
            f"{ranks_in_words(rank_groups[0])} waits at {first_state.spot.words()} while {ranks_in_words(rank_groups[1])} waits at "
            f"{other_state.spot.words()}: the ranks called different collectives{uneven}"
        ),
        cure=(
            "every rank must make the same calls in the same order: move the call out of `if is_main_process:` and other "
            "branches that depend on the rank, and give all ranks the same number of batches (prepare() the loader)."
        ),
    )


def _diagnose_same_call(
    states: Mapping[int, State], all_ranks: tuple[int, ...]
) -> Diagnosis:
    first_state = states[all_ranks[0]]
    return Diagnosis(
        "same call",
        all_ranks,
        (),
        ends="perhaps",
        sentence=f"all ranks wait in the same call, {first_state.spot.words()}: data is not transferred",
        cure=(
            "a slow or broken network, or a firewall between the machines (try `hasten test`, NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME); "
            "increase trust.stall_after_s if the transfer is that large."
        ),
    )


def _wait_ends(states: Mapping[int, State], ahead: Mapping[int, set[str]]) -> Ends:
    """Return whether a wait of ranks in different calls can end."""
    if any(
        not ahead[rank]
        and (
            state.kind == "device"
            or (state.kind in _TRAINING_KINDS and _is_behind(state, states))
        )
        for rank, state in states.items()
    ):
        # a device computes without the CPU, and a step may still reach the collective of the others
        return "perhaps"
    return "never" if _is_deadlock(states, ahead) else "hardly"


def _is_behind(state: State, states: Mapping[int, State]) -> bool:
    """Return whether another rank has started a collective of a common group that this one has not."""
    return any(
        other.counts.get(group, 0) > count
        for other in states.values()
        for group, count in state.counts.items()
        if not group.startswith(_BARRIER_PREFIX)
    )


def _is_deadlock(states: Mapping[int, State], ahead: Mapping[int, set[str]]) -> bool:
    """Return whether ranks in different calls are deadlocked: no rank is still receiving data that another has sent."""
    barrier_ranks = [rank for rank, state in states.items() if state.barrier]
    group_ranks = [rank for rank in states if rank not in barrier_ranks]
    if any(
        states[rank].kind != "collective" and not ahead[rank] for rank in group_ranks
    ):
        return False  # a backward may still be computing
    if not group_ranks:
        return True
    if barrier_ranks:
        return all(
            any(not group.startswith(_BARRIER_PREFIX) for group in ahead[rank])
            for rank in group_ranks
        )
    groups = {
        group
        for state in states.values()
        for group in state.counts
        if not group.startswith(_BARRIER_PREFIX)
    }
    if len(groups) > 1:
        return all(ahead[rank] for rank in group_ranks)
    (group,) = groups
    # a rank behind may still receive data
    return len({states[rank].counts.get(group, 0) for rank in group_ranks}) == 1


def _is_or_are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
