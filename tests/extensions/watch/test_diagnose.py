"""The diagnosis is a function of what is known: its laws, over sizes of the world and places of the culprit."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hasten.comm.collective_log import LIBRARIES, CollectiveRecord, calling_line
from hasten.extensions.watch import observe as processes
from hasten.extensions.watch import stacks
from hasten.extensions.watch import wording as words
from hasten.extensions.watch.diagnose import diagnose_stall
from hasten.extensions.watch.evidence import Evidence
from hasten.extensions.watch.stacks import StackCall, place_of
from hasten.extensions.watch.state import CodeLine, Note, ObservedRank, State, Status

SIZES = (2, 3, 8, 64)


def state(
    rank: int, site: str = "train.py:40", call: str = "gather", **changes: Any
) -> State:  # Any: fields of every type
    plain = {
        "kind": "collective",
        "step": 7,
        "cpu_share": 0.0,
        "counts": {"0/cpu": 10},
        "quiet_s": 31.0,
        "function": "main",
    }
    return State(
        rank=rank,
        host="h",
        pid=100 + rank,
        spot=CodeLine(site, call, f"{call}(x)"),
        **{**plain, **changes},
    )


def here(*states: State) -> list[ObservedRank]:
    return [
        ObservedRank(
            rank_state.rank,
            "here",
            rank_state,
            Note(rank_state.rank, "h", 100 + rank_state.rank, 1),
        )
        for rank_state in states
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("status", ["left", "failed", "gone", "stopped"])
def test_a_lost_rank_is_the_cause_whatever_the_others_do(
    size: int, status: Status
) -> None:
    for culprit in {0, size // 2, size - 1}:
        world = here(*(state(rank) for rank in range(size)))
        world[culprit] = ObservedRank(
            culprit,
            status,
            None,
            Note(
                culprit, "h", 5, 1, "at 10:00" if status in ("left", "failed") else ""
            ),
        )
        diagnosis = diagnose_stall(world)
        assert diagnosis is not None
        assert (diagnosis.cause, diagnosis.missing, diagnosis.wait_end) == (
            status,
            (culprit,),
            "never",
        )
        assert f"rank {culprit}" in diagnosis.sentence


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"kind": "user"}, "user code"),
        ({"kind": "user", "in_dataset": True}, "data"),
        ({"kind": "loader"}, "data"),
        ({"kind": "checkpoint", "io_quiet_s": 61.0}, "checkpoint"),
        ({"kind": "compiling", "quiet_s": 601.0}, "compiling"),
        ({"kind": "backward", "cpu_share": 0.9}, "user code"),
    ],
)
def test_a_rank_that_works_is_named_but_the_wait_may_end(
    size: int, changes: dict[str, Any], cause: str
) -> None:
    for culprit in {0, size - 1}:
        states = [
            state(rank)
            if rank != culprit
            else state(rank, "train.py:57", "", **changes)
            for rank in range(size)
        ]
        diagnosis = diagnose_stall(here(*states))
        assert diagnosis is not None
        assert (diagnosis.cause, diagnosis.missing, diagnosis.wait_end) == (
            cause,
            (culprit,),
            "perhaps",
        )
        assert diagnosis.sentence.startswith(f"rank {culprit} ")
        assert "train.py:57" in diagnosis.sentence


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "user", "block": "main_process_first"},
        {"kind": "checkpoint", "io_quiet_s": 0.5, "quiet_s": 3600.0},
        {"kind": "compiling", "quiet_s": 300.0},
    ],
)
def test_ranks_that_may_take_their_time_are_no_cause(
    size: int, changes: dict[str, Any]
) -> None:
    states = [
        state(rank) if rank else state(rank, "train.py:57", "", **changes)
        for rank in range(size)
    ]
    assert diagnose_stall(here(*states)) is None


@pytest.mark.parametrize("size", SIZES)
def test_nobody_waits_then_nothing_is_said(size: int) -> None:
    assert (
        diagnose_stall(
            here(*(state(rank, kind="user", quiet_s=9999.0) for rank in range(size)))
        )
        is None
    )
    assert (
        diagnose_stall(
            here(*(state(rank, kind="backward", cpu_share=0.8) for rank in range(size)))
        )
        is None
    )


@pytest.mark.parametrize("size", SIZES)
def test_different_calls_never_end(size: int) -> None:
    states = [
        state(rank) if rank else state(rank, "train.py:50", "broadcast")
        for rank in range(size)
    ]
    diagnosis = diagnose_stall(here(*states))
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.wait_end) == ("other call", "never")
    assert "train.py:50" in diagnosis.sentence
    assert "train.py:40" in diagnosis.sentence


def test_a_rank_still_receiving_what_another_has_sent_is_given_time() -> None:
    sender = state(
        0,
        "train.py:50",
        "wait_for_everyone",
        barrier=True,
        counts={"0/cpu": 10, "barrier/w": 1},
    )
    receiver = state(1, "train.py:40", "broadcast", counts={"0/cpu": 10})
    diagnosis = diagnose_stall(here(sender, receiver))
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.wait_end) == ("other call", "hardly")
    # began one that the other has not
    ahead = msgspec.structs.replace(receiver, counts={"0/cpu": 11})
    diagnosis = diagnose_stall(here(sender, ahead))
    assert diagnosis is not None
    assert diagnosis.wait_end == "never"


def test_a_backward_counts_as_waiting_only_when_it_computes_nothing() -> None:
    barrier = state(
        1,
        "train.py:60",
        "wait_for_everyone",
        barrier=True,
        counts={"0/cpu": 10, "barrier/w": 1},
    )
    waiting = state(0, "train.py:42", "backward", kind="backward", counts={"0/cpu": 11})
    diagnosis = diagnose_stall(here(waiting, barrier))
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.wait_end) == ("other call", "never")
    busy = msgspec.structs.replace(waiting, cpu_share=0.9)
    diagnosis = diagnose_stall(here(busy, barrier))
    assert diagnosis is not None
    assert (diagnosis.missing, diagnosis.wait_end) == ((0,), "perhaps")


def test_all_in_the_same_call() -> None:
    diagnosis = diagnose_stall(here(*(state(rank) for rank in range(4))))
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.wait_end) == ("same call", "perhaps")


def test_a_silent_rank_is_named_with_its_pid() -> None:
    world = [
        *here(state(0)),
        ObservedRank(1, "silent", None, Note(1, "node7", 4711, 1)),
    ]
    diagnosis = diagnose_stall(world)
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.missing) == ("silent", (1,))
    assert "pid 4711 on node7" in diagnosis.sentence
    text = words.render_report(diagnosis, world, 31.0, "it waits")
    assert "rank 1: does not respond" in text
    assert "rank 0: waits at train.py:40 gather(x) for 31 s, after 7 updates" in text


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_moves_is_neither_silent_nor_waiting(size: int) -> None:
    for mover in {0, size // 2, size - 1}:
        world = here(
            *(
                state(rank, moves=rank == mover, counts={"0/cpu": 10 + rank})
                for rank in range(size)
            )
        )
        diagnosis = diagnose_stall(world)
        assert diagnosis is not None
        assert (diagnosis.cause, diagnosis.missing, diagnosis.wait_end) == (
            "elsewhere",
            (mover,),
            "perhaps",
        )
        assert mover not in diagnosis.waiting
        assert f"rank {mover}: is busy with other collectives" in words.render_report(
            diagnosis, world, 31.0, "it waits"
        )
        in_block = here(
            *(
                state(rank, moves=rank == mover, block="main_process_first")
                for rank in range(size)
            )
        )
        assert diagnose_stall(in_block) is None, (
            "the others wait for it with its knowledge"
        )


def left(rank: int, counts: dict[str, int] | None) -> ObservedRank:
    return ObservedRank(
        rank, "left", None, Note(rank, "h", 5, 1, "at 10:00", counts=counts)
    )


def test_a_rank_that_has_left_is_the_cause_only_where_it_is_missing() -> None:
    """Ranks wait for one that has left in groups in which they have begun a collective that it has not."""
    world = here(
        state(0, counts={"0/cpu": 10, "pair/cpu": 4}),
        state(1, counts={"0/cpu": 10, "pair/cpu": 3}, kind="user"),
    )
    diagnosis = diagnose_stall([*world, left(2, {"0/cpu": 10})])
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.missing, diagnosis.wait_end) == (
        "user code",
        (1,),
        "perhaps",
    )
    diagnosis = diagnose_stall([*world, left(2, {"0/cpu": 9})])
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.missing, diagnosis.wait_end) == (
        "left",
        (2,),
        "never",
    )
    unknown = diagnose_stall([*world, left(2, None)])
    assert unknown is not None
    assert unknown.missing == (1,), "the rank that works explains the wait"


def test_the_same_call_from_different_lines_may_be_one_collective() -> None:
    states = [
        state(0, "train.py:40", "broadcast"),
        state(1, "train.py:42", "broadcast"),
    ]
    diagnosis = diagnose_stall(here(*states))
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.wait_end) == ("same call", "perhaps")
    diagnosis = diagnose_stall(
        here(states[0], msgspec.structs.replace(states[1], counts={"0/cpu": 11}))
    )
    assert diagnosis is not None
    assert diagnosis.cause == "other call"


@pytest.mark.parametrize("thread", ["runs", "disk"])
def test_a_thread_that_wants_the_processor_or_the_disk_does_not_wait_for_ranks(
    thread: Any,
) -> None:
    waiting = state(0, counts={"0/cpu": 11})
    diagnosis = diagnose_stall(
        here(waiting, state(1, "train.py:42", "forward", kind="forward", thread=thread))
    )
    assert diagnosis is not None
    assert (diagnosis.missing, diagnosis.wait_end) == ((1,), "perhaps")


def test_a_step_that_is_behind_may_come_yet() -> None:
    behind = state(1, "train.py:42", "backward", kind="backward")
    diagnosis = diagnose_stall(here(state(0, counts={"0/cpu": 11}), behind))
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.wait_end) == ("other call", "perhaps")
    diagnosis = diagnose_stall(here(state(0), behind))
    assert diagnosis is not None
    assert diagnosis.wait_end == "hardly", (
        "it has begun as many, so it waits in another collective"
    )


def test_a_device_may_compute_without_the_processor() -> None:
    diagnosis = diagnose_stall(
        here(state(0), state(1, "train.py:42", "synchronize", kind="device"))
    )
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.wait_end) == ("other call", "perhaps")


def test_unequal_batches_are_named_where_one_rank_trains_and_another_has_ended() -> (
    None
):
    ending = state(0, "train.py:50", "end_training", kind="ending")
    diagnosis = diagnose_stall(
        here(
            ending,
            state(1, "train.py:42", "backward", kind="backward", counts={"0/cpu": 11}),
        )
    )
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.missing, diagnosis.wait_end) == (
        "uneven",
        (0,),
        "never",
    )
    assert "unequal numbers of batches" in diagnosis.sentence
    slow = diagnose_stall(
        here(
            msgspec.structs.replace(ending, io_quiet_s=61.0),
            state(1, "train.py:60", counts={"0/cpu": 11}),
        )
    )
    assert slow is not None
    assert (slow.missing, slow.wait_end) == ((0,), "perhaps"), (
        "it may come to the barrier"
    )


def test_evidence_is_what_ranks_post_now_and_twice() -> None:
    evidence = Evidence(0, 1.0)
    first_state, second_state = (
        state(0, turn=1),
        state(1, "train.py:50", "broadcast", turn=8),
    )
    diagnosis = diagnose_stall(here(first_state, second_state))
    assert diagnosis is not None
    results = []
    for turn in (8, 8, 9, 10, 10, 11, 12):
        world = here(first_state, msgspec.structs.replace(second_state, turn=turn))
        results.append(evidence.confirms_diagnosis(diagnosis, world))
    assert results == [False, False, False, True, False, False, True], (
        "two more posts each time"
    )
    moved = msgspec.structs.replace(second_state, turn=14, counts={"0/cpu": 11})
    assert not evidence.confirms_diagnosis(diagnosis, here(first_state, moved)), (
        "another wait than before"
    )


def test_a_state_that_is_not_posted_again_is_dropped() -> None:
    evidence = Evidence(0, 1.0)
    states = {0: state(0, turn=3, quiet_s=5.0), 1: state(1, turn=3, quiet_s=5.0)}
    assert set(evidence.current_states(states, 100.0)) == {0, 1}
    assert set(evidence.current_states(states, 104.0)) == {0, 1}
    assert set(evidence.current_states(states, 115.0)) == {0}, (
        "this rank's own is always of now"
    )
    states[1] = msgspec.structs.replace(states[1], turn=4)
    assert set(evidence.current_states(states, 116.0)) == {0, 1}


def test_a_stopped_neighbour_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as busy:
        try:
            note = Note(1, "h", busy.pid, processes.start_ticks(busy.pid))
            assert processes.lost_neighbours([note]) == {}
            os.kill(busy.pid, signal.SIGSTOP)
            deadline = time.monotonic() + 30
            while (lost := processes.lost_neighbours([note])) != {1: "stopped"}:
                assert time.monotonic() < deadline, lost
        finally:
            busy.kill()


def test_a_process_is_not_gone_because_its_file_cannot_be_opened() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert processes.status_of(os.getpid(), 1) == "here"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert processes.pid_namespace() == str(Path("/proc/self/ns/pid").readlink())


def test_ranks_that_do_the_same_share_a_line() -> None:
    world = here(
        *(
            state(rank) if rank != 5 else state(rank, "train.py:57", kind="user")
            for rank in range(64)
        )
    )
    diagnosis = diagnose_stall(world)
    assert diagnosis is not None
    text = words.render_report(diagnosis, world, 31.0, "it waits")
    assert "  ranks 0-4, 6-63: waits at train.py:40" in text
    assert "  rank 5: is in user code at train.py:57" in text


TORCH, HASTEN = "/x/site-packages/torch", LIBRARIES[0]
STACKS: tuple[tuple[list[tuple[str, str]], str, str], ...] = (
    ([(f"{TORCH}/distributed/distributed_c10d.py", "all_reduce")], "collective", "all_reduce"),
    ([(f"{HASTEN}comm/ops.py", "gather"), (f"{HASTEN}accelerator/facade.py", "gather")], "collective", "gather"),
    ([(f"{HASTEN}comm/process_group.py", "wait"), (f"{HASTEN}accelerator/facade.py", "wait_for_everyone")], "collective", "wait_for_everyone"),
    ([(f"{HASTEN}checkpoint/store/disk.py", "write"), (f"{HASTEN}accelerator/facade.py", "save_state")], "checkpoint", "save_state"),
    ([(f"{TORCH}/utils/data/dataloader.py", "_get_data"), (f"{HASTEN}data/loader.py", "__iter__")], "loader", "__iter__"),
    ([(f"{TORCH}/autograd/graph.py", "_engine_run_backward"), (f"{TORCH}/_tensor.py", "backward")], "backward", "backward"),
    ([(f"{TORCH}/distributed/fsdp/x.py", "wait"), (f"{TORCH}/nn/modules/module.py", "_call_impl")], "forward", "_call_impl"),
    ([(f"{TORCH}/distributed/distributed_c10d.py", "barrier"), ("<frozen importlib._bootstrap>", "_find_and_load")], "collective", "barrier"),
    ([(f"{LIBRARIES[2]}subprocess.py", "wait"), ("/x/site-packages/layers/layer.py", "forward"), (f"{TORCH}/nn/parallel/distributed.py", "forward")], "user", ""),
    ([(f"{HASTEN}trust/divergence/divergence_check.py", "finish"), (f"{HASTEN}accelerator/facade.py", "end_training")], "ending", "end_training"),
    ([(f"{HASTEN}comm/process_group.py", "wait"), (f"{HASTEN}accelerator/facade.py", "end_training")], "collective", "end_training"),
    ([(f"{TORCH}/_inductor/compile_fx.py", "compile"), (f"{TORCH}/nn/modules/module.py", "_call_impl")], "compiling", "_call_impl"),
    ([], "user", ""),
    ([("/x/site-packages/requests/api.py", "get")], "user", ""),
)  # fmt: skip


@pytest.mark.parametrize(("inner", "kind", "call"), STACKS)
def test_the_place_of_a_stack(
    inner: list[tuple[str, str]], kind: str, call: str
) -> None:
    frames = [StackCall(file, 1, function) for file, function in inner]
    call_site = place_of(
        [
            *frames,
            StackCall("/home/me/train.py", 42, "main"),
            StackCall(f"{HASTEN}launch/worker.py", 1, "main"),
        ]
    )
    assert (call_site.kind, call_site.call, call_site.line, call_site.function) == (
        kind,
        call,
        42,
        "main",
    )


def test_users_code_inside_a_loader_or_a_save_is_known_as_such() -> None:
    dataset = [
        StackCall("/home/me/data.py", 9, "__getitem__"),
        StackCall(f"{TORCH}/utils/data/_utils/fetch.py", 1, "fetch"),
    ]
    assert place_of(dataset).in_dataset
    saving = [
        StackCall("/home/me/ema.py", 9, "state_dict"),
        StackCall(f"{HASTEN}checkpoint/save.py", 1, "write"),
    ]
    assert place_of(saving).kind == "checkpoint"


def test_a_thread_is_seen_where_it_is() -> None:
    over = threading.Event()

    def waits_here() -> None:
        over.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while "waits_here" not in {
            call.function for call in stacks.calls_of(thread.ident or 0)
        }:
            assert time.monotonic() < deadline
        call_site = place_of(stacks.calls_of(thread.ident or 0))
        assert (call_site.kind, call_site.function) == ("user", "waits_here")
        assert call_site.line == waits_here.__code__.co_firstlineno + 1
        assert stacks.source_line(call_site.file, call_site.line) == "over.wait()"
    finally:
        over.set()
        thread.join()
    assert stacks.calls_of(thread.ident or 0) == []


def test_the_trail_names_the_users_line() -> None:
    collectives = CollectiveRecord()
    collectives.note("barrier", group="w")
    line = sys._getframe().f_lineno - 1
    assert collectives.last is not None
    assert (collectives.last.op, collectives.last.file, collectives.last.line) == (
        "barrier",
        __file__,
        line,
    )
    assert (collectives.count, collectives.turns["w"]) == (1, 1)
    assert calling_line(1)[0] == __file__
    with collectives.extend_patience("main_process_first"):
        assert collectives.block == "main_process_first"
    assert collectives.block == ""


def test_the_kernel_knows_this_process() -> None:
    started = processes.start_ticks()
    pid = os.getpid()
    assert processes.status_of(pid, started) == "here"
    # a later process with the same pid
    assert processes.status_of(pid, started + 1) == "gone"
    assert processes.status_of(2**22 + 1, 0) == "gone"
    assert processes.io_count() > 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("behind", "expected_end"), [(10, "hardly"), (11, "never")])
def test_who_may_still_receive_is_given_time(
    size: int, behind: int, expected_end: str
) -> None:
    states = [state(0, "train.py:41", counts={"0/cpu": 11})]
    states += [
        state(rank, "train.py:40", "broadcast", counts={"0/cpu": behind})
        for rank in range(1, size)
    ]
    diagnosis = diagnose_stall(here(*states))
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.wait_end) == ("other call", expected_end)
