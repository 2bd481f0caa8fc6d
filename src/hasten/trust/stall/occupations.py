"""Descriptions of ranks that are busy while others wait for them. Pure."""

from __future__ import annotations

from hasten.trust.divergence.state import IDLE_SHARE, Cause, State


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
