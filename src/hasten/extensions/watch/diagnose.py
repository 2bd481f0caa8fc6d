"""Diagnosis of a stall: a pure function from the states of all ranks to the likely cause. No clock, store or torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hasten.extensions.watch.state import IDLE_SHARE, Cause, SeenState, State
from hasten.runtime.nodelist import ranks_in_words


def occupation(state: State) -> tuple[Cause, str, str]:
    """Return the cause, a description of the rank's activity, and a remedy."""
    where = state.spot.words()
    match state.kind:
        case "loader":
            return (
                "data",
                f"waits for its next batch at {where}",
                "check the dataset's slowest samples and the DataLoader's workers (num_workers, prefetch_factor, a worker that "
                "waits for a lock or a download).",
            )
        case "checkpoint":
            return (
                "checkpoint",
                f"is in a save or load at {where} and has read and written nothing for {state.io_quiet_s:.0f} s",
                "the disk or network file system does not respond: check its mount, its quota and `dmesg`.",
            )
        case "compiling":
            return "compiling", f"compiles at {where}", "increase trust.stall_after_s if compiling takes this long."
        case "importing":
            return "importing", f"imports modules at {where}", "check the disk with the Python environment."
        case "debugger":
            cure = "continue with `c`, or run with trust.stall=off."
            return "debugger", f"is in the Python debugger at {where}", cure
        case "ending":
            return (
                "user code",
                f"is in end_training() at {where}",
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
            f"is in the dataset's code at {where}, called by its DataLoader",
            "check why this sample takes so long: a lock, a download, an endless loop.",
        )
    return (
        "user code",
        f"is in user code at {where} in {state.function}(), {_activity(state)},",
        "an endless loop, a lock, or work on this rank only: do it on all ranks or inside main_process_first(), or increase "
        "trust.stall_after_s if it takes this long.",
    )


def _activity(state: State) -> str:
    if state.thread == "disk":
        return "waiting for the disk or for memory that was swapped out"
    return "asleep" if state.cpu_share < IDLE_SHARE and state.thread == "asleep" else "busy"


Ends = Literal["never", "hardly", "perhaps"]
"""Whether a wait can end: never; hardly, unless a computation still runs; perhaps, because a rank still works."""
_BARRIER: Final = "barrier/"
_SLOW_IO: Final = ("checkpoint", "ending")
_TRAINING: Final = ("backward", "forward")


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
    world: Sequence[SeenState], io_patience_s: float = 60.0, lost_hosts: Collection[str] = ()
) -> Diagnosis | None:
    """Return the cause of a wait; None if no rank waits, or all missing ranks are expected to take long.

    `lost_hosts` are hosts that do not respond to the launcher either.
    """
    present = {seen.rank: seen.state for seen in world if seen.status == "here" and seen.state is not None}
    states = {rank: state for rank, state in present.items() if not state.moves}
    ahead = _ahead(states)
    waiting = tuple(rank for rank, state in states.items() if state.waits or (ahead[rank] and state.kind == "device"))
    if not waiting:
        return None
    lost = [seen for seen in world if seen.status in ("left", "failed", "gone", "stopped")]
    working = [state for rank, state in states.items() if rank not in waiting]
    if needed := [seen for seen in lost if _is_needed(seen, [states[rank] for rank in waiting], bool(working))]:
        return _lost(waiting, needed)
    silent = [seen for seen in world if seen.status == "silent"]
    if unreachable := [seen for seen in silent if seen.note is not None and seen.note.host in lost_hosts]:
        return _unreachable(waiting, unreachable)
    if working:
        return _uneven(states, waiting, ahead, working) or _working(waiting, working, io_patience_s)
    if silent:
        return _silent(waiting, silent)
    if moving := [state for state in present.values() if state.moves]:
        return _elsewhere(waiting, [state for state in moving if not state.block])
    return _all_wait(states, ahead)


def _ahead(states: Mapping[int, State]) -> dict[int, set[str]]:
    """Return, for each rank, the groups in which it has started a collective that another rank has not."""
    found: dict[int, set[str]] = {rank: set() for rank in states}
    for group in {group for state in states.values() for group in state.counts}:
        counts = {rank: state.counts[group] for rank, state in states.items() if group in state.counts}
        if group.startswith(_BARRIER):
            counts = {rank: state.counts.get(group, 0) for rank, state in states.items()}
        for rank, count in counts.items():
            if count > min(counts.values()):
                found[rank].add(group)
    return found


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
        state.barrier or any(group in counts and count > counts[group] for group, count in state.counts.items())
        for state in waiting
    )


def _lost(waiting: tuple[int, ...], lost: Sequence[SeenState]) -> Diagnosis:
    status = next(
        status for status in ("failed", "stopped", "gone", "left") if any(seen.status == status for seen in lost)
    )
    those = [seen for seen in lost if seen.status == status]
    ranks = tuple(seen.rank for seen in those)
    named = ranks_in_words(ranks)
    ended = next((seen.note.ended for seen in those if seen.note is not None and seen.note.ended), "")
    match status:
        case "stopped":
            sentence = f"{named} {_is(ranks)} stopped (SIGSTOP, Ctrl-Z or a debugger)"
            cure = f"resume it with `kill -CONT {those[0].note.pid if those[0].note else 'PID'}`, or find out why it was stopped."
        case "left":
            sentence = f"{named} ended without an error{ended and f' {ended}'}, while other ranks still needed it"
            cure = (
                "let every rank run the same steps and end together: no sys.exit, return or break that depends on the rank, and the "
                "same number of batches on every rank (prepare() the loader)."
            )
        case "failed":
            sentence = f"{named} failed{ended and f': {ended}'}"
            cure = "fix the error of that rank; the others only waited for it."
        case _:
            sentence = f"the process of {named} has exited without an error message"
            cure = "it was killed or crashed: check its last output, and `dmesg` for the out-of-memory killer."
    return Diagnosis(status, waiting, ranks, ends="never", sentence=sentence, cure=cure)  # type: ignore[arg-type]  # one of the four


def _uneven(
    states: Mapping[int, State], waiting: tuple[int, ...], ahead: Mapping[int, set[str]], working: Sequence[State]
) -> Diagnosis | None:
    """Return a diagnosis if ranks have reached the end of training while others wait for them in a step."""
    ending = [state for state in working if state.kind == "ending"]
    training = [states[rank] for rank in waiting if states[rank].kind in _TRAINING and ahead[rank]]
    if not ending or not training:
        return None
    ranks = tuple(sorted(state.rank for state in ending))
    first, other = min(ending, key=lambda state: state.rank), training[0]
    return Diagnosis(
        "uneven",
        waiting,
        ranks,
        ends="never",
        sentence=(
            f"{ranks_in_words(ranks)} {_is(ranks)} in end_training() at {first.spot.words()} after {first.step} updates, while rank "
            f"{other.rank} waits at {other.spot.words()} for one more: the ranks have unequal numbers of batches"
        ),
        cure=(
            "give every rank the same number of batches (prepare() the loader, or use join_uneven_inputs()), and call "
            "end_training() on every rank after the same update."
        ),
    )


def _working(waiting: tuple[int, ...], working: Sequence[State], io_patience_s: float) -> Diagnosis | None:
    busy = [state for state in working if not _may_take_its_time(state, io_patience_s)]
    if not busy:
        return None
    state = max(busy, key=lambda state: state.quiet_s)
    cause, doing, cure = occupation(state)
    last = f"; its last collective was {state.last.words()}, {state.last_ago_s:.0f} s ago" if state.last else ""
    return Diagnosis(
        cause,
        waiting,
        tuple(sorted(state.rank for state in busy)),
        ends="perhaps",
        sentence=f"rank {state.rank} {doing} ({state.quiet_s:.0f} s){last}",
        cure=cure,
    )


def _may_take_its_time(state: State, io_patience_s: float) -> bool:
    """Return whether this rank's delay is expected: in a marked block, or busy with a file, compilation or import."""
    if state.kind in _SLOW_IO:
        return state.io_quiet_s < io_patience_s
    return bool(state.block) or (state.kind in ("compiling", "importing") and state.quiet_s < 10 * io_patience_s)


def _unreachable(waiting: tuple[int, ...], silent: Sequence[SeenState]) -> Diagnosis:
    ranks = tuple(seen.rank for seen in silent)
    hosts = sorted({seen.note.host for seen in silent if seen.note is not None})
    pids = ", ".join(f"pid {seen.note.pid} on {seen.note.host}" for seen in silent[:4] if seen.note is not None)
    return Diagnosis(
        "unreachable",
        waiting,
        ranks,
        ends="hardly",
        sentence=(
            f"{ranks_in_words(ranks)} ({pids}) does not respond, nor does the launcher on {', '.join(hosts)}: the machine has failed, "
            "or the network to it is down"
        ),
        cure="check that machine and the network (`ping`, `dmesg`); with --max_restarts the job waits until it is restarted.",
    )


def _silent(waiting: tuple[int, ...], silent: Sequence[SeenState]) -> Diagnosis:
    ranks = tuple(seen.rank for seen in silent)
    pids = ", ".join(f"pid {seen.note.pid} on {seen.note.host}" for seen in silent[:4] if seen.note is not None)
    if all(seen.note is None for seen in silent):
        words = f"{ranks_in_words(ranks)} has not created an Accelerator yet, or its machine has failed"
    else:
        words = (
            f"{ranks_in_words(ranks)} ({pids}) does not respond: native code that holds the GIL, or a failed machine"
        )
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


def _elsewhere(waiting: tuple[int, ...], moving: Sequence[State]) -> Diagnosis | None:
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
            f"{ranks_in_words(ranks)} {_is(ranks)} busy with other collectives, now at {moving[0].spot.words()}, while others wait in one "
            f"that {'it has' if len(ranks) == 1 else 'they have'} not started"
        ),
        cure=(
            "make the same calls in the same order on every rank of a group; if only some ranks have work, use main_process_first(), or "
            "increase trust.stall_after_s if it takes this long."
        ),
    )


def _all_wait(states: Mapping[int, State], ahead: Mapping[int, set[str]]) -> Diagnosis:
    """Return the diagnosis if every rank waits: for each other in different calls, or all in the same call."""
    places: dict[tuple[str, str], list[int]] = {}
    even = not any(ahead.values())  # then the same call from different lines is one collective
    for rank, state in states.items():
        places.setdefault(("" if even else state.spot.site, state.spot.call), []).append(rank)
    everyone = tuple(sorted(states))
    if len(places) == 1:
        return _same_place(states, everyone)
    groups = sorted(places.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    first, other = states[groups[0][0]], states[groups[1][0]]
    uneven = ""
    if len({state.step for state in states.values()}) > 1:
        fewest, most = (pick(states.values(), key=lambda state: state.step) for pick in (min, max))
        uneven = f"; rank {fewest.rank} has made {fewest.step} updates and rank {most.rank} {most.step}"
    return Diagnosis(
        "other call",
        everyone,
        (),
        ends=_ends(states, ahead),
        sentence=(
            f"{ranks_in_words(groups[0])} waits at {first.spot.words()} while {ranks_in_words(groups[1])} waits at "
            f"{other.spot.words()}: the ranks called different collectives{uneven}"
        ),
        cure=(
            "every rank must make the same calls in the same order: move the call out of `if is_main_process:` and other "
            "branches that depend on the rank, and give all ranks the same number of batches (prepare() the loader)."
        ),
    )


def _same_place(states: Mapping[int, State], everyone: tuple[int, ...]) -> Diagnosis:
    first = states[everyone[0]]
    return Diagnosis(
        "same call",
        everyone,
        (),
        ends="perhaps",
        sentence=f"all ranks wait in the same call, {first.spot.words()}: data is not transferred",
        cure=(
            "a slow or broken network, or a firewall between the machines (try `hasten test`, NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME); "
            "increase trust.stall_after_s if the transfer is that large."
        ),
    )


def _ends(states: Mapping[int, State], ahead: Mapping[int, set[str]]) -> Ends:
    """Return whether a wait of ranks in different calls can end."""
    if any(
        not ahead[rank] and (state.kind == "device" or (state.kind in _TRAINING and _is_behind(state, states)))
        for rank, state in states.items()
    ):
        return "perhaps"  # a device computes without the CPU, and a step may still reach the collective of the others
    return "never" if _deadlock(states, ahead) else "hardly"


def _is_behind(state: State, states: Mapping[int, State]) -> bool:
    """Return whether another rank has started a collective of a common group that this one has not."""
    return any(
        other.counts.get(group, 0) > count
        for other in states.values()
        for group, count in state.counts.items()
        if not group.startswith(_BARRIER)
    )


def _deadlock(states: Mapping[int, State], ahead: Mapping[int, set[str]]) -> bool:
    """Return whether ranks in different calls are deadlocked: no rank is still receiving data that another has sent."""
    at_barrier = [rank for rank, state in states.items() if state.barrier]
    in_group = [rank for rank in states if rank not in at_barrier]
    if any(states[rank].kind != "collective" and not ahead[rank] for rank in in_group):
        return False  # a backward may still be computing
    if not in_group:
        return True
    if at_barrier:
        return all(any(not group.startswith(_BARRIER) for group in ahead[rank]) for rank in in_group)
    groups = {group for state in states.values() for group in state.counts if not group.startswith(_BARRIER)}
    if len(groups) > 1:
        return all(ahead[rank] for rank in in_group)
    (group,) = groups
    return len({states[rank].counts.get(group, 0) for rank in in_group}) == 1  # a rank behind may still receive data


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
