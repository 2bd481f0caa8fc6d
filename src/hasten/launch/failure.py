"""Report of a failed job: the rank that failed first with its traceback, one line per other rank, and a hint."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from hasten.runtime import env as environment
from hasten.runtime.nodelist import ranks_in_words


@dataclass(frozen=True, slots=True)
class Failure:
    """Exit status of one failed rank. A negative `code` is a signal number, as in subprocess."""

    rank: int
    host: str
    code: int
    time: float
    pid: int = 0
    summary: str = ""
    traceback: str = ""
    stopped: bool = False
    """True if the launcher stopped the rank because another rank had failed."""
    echo: bool = False
    """True if the rank raised an error on which all ranks agreed, and had no error itself."""

    @property
    def exit_code(self) -> int:
        """Shell exit code: 128 + signal number for signals."""
        return 128 - self.code if self.code < 0 else self.code

    def encode(self) -> dict[str, Any]:
        """Return the failure as plain data."""
        return asdict(self)

    @classmethod
    def decode(cls, data: dict[str, Any]) -> Self:
        """Return the failure in `data`."""
        return cls(**data)


# Error messages of a rank whose peer failed.
_LOST_CONNECTION: Final = re.compile(
    r"PeerFailedError|MissingRanksError|[Cc]onnection (closed|reset) by peer|[Cc]onnection closed by remote|Broken pipe|"
    r"remote process exited|Socket (Timeout|closed)|NCCL communicator was aborted|DistNetworkError|"
    r"Connection refused|failed to recv, got 0 bytes",
)

PREEMPTED: Final = 85  # hasten.PREEMPTED_EXIT_CODE, whose module imports torch

# hasten.extensions.watch.observe.STALLED, whose module imports torch
STALLED: Final = 86

# (pattern in the traceback or log, hint)
_HINTS: Final = (
    (r"Address already in use|EADDRINUSE|errno: ?98\b",
     "the port is taken, often by a run that is still running: choose another with --main_process_port (0 picks a free one)."),
    (r"(CUDA|HIP|XPU|MPS).{0,40}out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
     "the device is out of memory: lower the batch size and raise gradient accumulation, use bf16, recompute activations or "
     "shard with FSDP."),
    (r"CUDA driver version is insufficient|no kernel image is available|not compiled with CUDA|libcud(a|art)[^\s]*: cannot open|"
     r"Found no NVIDIA driver|forward compatibility was attempted|CUDA_ERROR_INVALID_PTX|unsupported toolchain|"
     r"CUDA error: invalid device ordinal",
     "torch, the CUDA driver and the device do not match on this machine: compare `hasten env` with a machine that works, "
     "and install the torch build for this driver (or pass --cpu)."),
    (r"ModuleNotFoundError",
     "a module is missing on this machine: install it there ({host}) as on the others, in the environment of {python}."),
    (r"Watchdog caught collective operation timeout|collective operation timeout|Timed out waiting \d+ms|"
     r"wait timeout after|Timeout waiting for key|DistStoreError.*timed? ?out|timed out after \d+",
     "a collective waited until the timeout: another rank is stuck, slow or skipped the call. The stall report above names it "
     "(docs/trust.md); if a rank works long between collectives, raise the timeout in InitProcessGroupKwargs."),
    (r"NCCL error|ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclRemoteError",
     "NCCL failed: run again with NCCL_DEBUG=WARN for its reason; with several network interfaces set NCCL_SOCKET_IFNAME."),
    (r"Connection (closed|reset) by peer|Broken pipe|remote process exited|PeerFailedError",
     "the connection to another rank was lost: that rank, or its machine, ended first. Check its output."),
    (r"unable to resolve|Name or service not known|Temporary failure in name resolution|gai error",
     "a host name cannot be resolved: give --main_process_ip as a number, or fix the name service on this machine."),
    (r"Unable to find address for|ifa == nullptr|no interface|makeDeviceForHostname|makeDeviceForInterface",
     "gloo found no network interface for this host name: set GLOO_SOCKET_IFNAME to the interface that reaches the others."),
    (r"No space left on device|bus error|unable to (open|mmap) shared memory|/dev/shm",
     "the disk or shared memory is full: in a container raise --shm-size, or use fewer loader workers."),
    (r"Too many open files", "too many open files: raise `ulimit -n`, or torch.multiprocessing.set_sharing_strategy('file_system')."),
)  # fmt: skip

_SIGNAL_HINTS: Final = MappingProxyType(
    {
        signal.SIGKILL: "SIGKILL was sent from outside the program, most probably by the kernel's out-of-memory killer or a "
        "scheduler (see `dmesg | grep -i oom`): use less host memory (fewer loader workers, smaller "
        "prefetch, one rank loading at a time) or ask for more.",
        signal.SIGSEGV: "a crash in native code: a mismatch of compiled packages is the usual cause; compare `hasten env` with a machine that works.",
        signal.SIGABRT: "native code aborted; its last message is in the output above.",
        signal.SIGBUS: "a bus error usually means that shared memory (/dev/shm) is full: raise it, or use fewer loader workers.",
        signal.SIGTERM: "SIGTERM was sent from outside the program: a scheduler's time limit, a preemption or a user.",
        signal.SIGXCPU: "the CPU time limit was reached (`ulimit -t` or the scheduler's).",
    }
)


def first_failure(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others: not stopped by the launcher, not a lost connection, then the earliest.

    If all errors are lost connections, a rank that exited without an error (`code` 0) is the cause.
    """
    failures = list(failures)
    failed_ranks = [failure for failure in failures if failure.code != 0]
    early_exits = [failure for failure in failures if failure.code == 0]
    if early_exits and all(
        failure.stopped or _is_echo(failure) for failure in failed_ranks
    ):
        return min(early_exits, key=lambda failure: (failure.time, failure.rank))
    return min(
        failed_ranks,
        key=lambda failure: (
            failure.stopped,
            _is_echo(failure),
            failure.time,
            failure.rank,
        ),
    )


def _is_echo(failure: Failure) -> bool:
    return failure.echo or bool(_LOST_CONNECTION.search(failure.summary))


def hint_for(failure: Failure, python: str = "python") -> str | None:
    """Return a hint for a known cause, or None."""
    failure_text = failure.traceback or failure.summary
    for pattern, hint_text in _HINTS:
        if failure_text and re.search(pattern, failure_text):
            return hint_text.format(host=failure.host, python=python)
    if failure.code == 0:
        return (
            "a rank that ends early (sys.exit, return, a loop that ended early) is missing in the next collective of the others: let "
            "every rank run the same steps and end together."
        )
    if failure.code == PREEMPTED:
        return "exit code 85 means that the run saved a checkpoint and stopped after a signal: restart it (--max_restarts does) to continue."
    if failure.code < 0:
        return _SIGNAL_HINTS.get(signal.Signals(-failure.code))
    return None


def end_after_signal(number: int, codes: Sequence[int | None]) -> tuple[int, str]:
    """Return the exit code of a launcher that a signal has stopped, and a description of its processes' end.

    Processes that all end by themselves after SIGTERM or SIGUSR1 have handled it: the run is to be started again, as after exit code 85.
    """
    if (
        number not in (signal.SIGTERM, signal.SIGUSR1)
        or not codes
        or not set(codes) <= {0, PREEMPTED}
    ):
        return 128 + number, "were ended"
    if set(codes) == {PREEMPTED}:
        end_text = "have saved and exited"
    else:
        end_text = "have exited without an error"
    return PREEMPTED, f"{end_text}; restart the job to continue"


def end_words(code: int) -> str:
    """Return a description of an exit code or signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        signal_name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    if -code == signal.SIGKILL:
        return f"killed by {signal_name}"
    return f"signal {signal_name}"


def read_failure(
    rank: int, host: str, code: int, pid: int, *, error_file: str, time: float
) -> Failure:
    """Return the failure of a rank, including the error that the rank recorded, if any."""
    if error_file:
        recorded_error = _read_error_record(Path(error_file))
    else:
        recorded_error = {}
    # the rank had already failed when the launcher stopped it
    if recorded_error and code == -signal.SIGTERM:
        code = 1
    return Failure(
        rank=rank,
        host=host,
        code=code,
        time=recorded_error.get("time", time),
        pid=pid,
        summary=recorded_error.get("summary", ""),
        traceback=recorded_error.get("traceback", ""),
        stopped=code == -signal.SIGTERM,
        echo=recorded_error.get("echo", False),
    )


def _read_error_record(path: Path) -> dict[str, Any]:
    """Return the error that hasten's bootstrap or torch's @record wrote in the failing process; empty without one."""
    try:
        error_record = json.loads(path.read_text())
    # killed before or during the write: only the exit code is known
    except (OSError, ValueError):
        return {}
    if "hasten" in error_record:
        return dict(error_record["hasten"])
    torch_message = error_record.get("message")
    if not isinstance(torch_message, dict):
        return {"summary": str(torch_message)}
    extra_info = torch_message.get("extraInfo", {})
    return {
        "summary": str(torch_message.get("message", "")),
        "traceback": str(extra_info.get("py_callstack", "")),
        "time": float(extra_info.get("timestamp", 0)),
    }


def render_failure(
    failures: Sequence[Failure],
    *,
    python: str = "python",
    is_full: bool = False,
    lost_machines: Sequence[str] = (),
) -> str:
    """Return the report of a failed job: summary, hint, and finally the traceback of the first failure.

    With `full` (under --debug) the other ranks' tracebacks precede it. `lost` lists machines that stopped responding.
    """
    first_cause = first_failure(failures)
    if first_cause.code == STALLED:
        stall_text = (
            first_cause.summary.partition(": ")[2]
            or "the ranks waited for each other without progress"
        )
        return f"the job was ended because it stalled: {stall_text}.\nThe full report is above; docs/trust.md explains it."
    later_failures = sorted(
        (
            failure
            for failure in failures
            if failure != first_cause and failure.code != 0
        ),
        key=lambda failure: failure.rank,
    )
    if first_cause.code:
        order_text = "failed first"
    else:
        order_text = "exited first, while other ranks still needed it"
    report_lines = [
        f"rank {first_cause.rank} on {first_cause.host} (pid {first_cause.pid}) {order_text}: {end_words(first_cause.code)}"
    ]
    if lost_machines:
        report_lines = [
            f"{' and '.join(lost_machines)} no longer responds: probably the first failure, check it",
            *report_lines,
        ]
    for summary_line in _summary_lines(later_failures):
        report_lines.append(f"  {summary_line}")
    if hint := hint_for(first_cause, python):
        report_lines.append(f"hint: {hint}")
    for later_failure in later_failures:
        if is_full and later_failure.traceback:
            report_lines += [
                "",
                f"rank {later_failure.rank} on {later_failure.host}:",
                later_failure.traceback.rstrip(),
            ]
    report_lines.append("")
    if not first_cause.code and (
        echo_failure := next(
            (failure for failure in later_failures if failure.traceback), None
        )
    ):
        report_lines += [
            f"traceback of rank {echo_failure.rank} on {echo_failure.host}, which lost the connection:",
            echo_failure.traceback.rstrip(),
        ]
    elif first_cause.traceback:
        # a program that never started
        if first_cause.traceback.startswith("Traceback"):
            title = "traceback"
        else:
            title = "error"
        report_lines += [
            f"{title} of rank {first_cause.rank} on {first_cause.host}:",
            first_cause.traceback.rstrip(),
        ]
    else:
        report_lines.append(
            f"rank {first_cause.rank} has no Python traceback; its last output is above."
        )
    return "\n".join(report_lines)


def _summary_lines(failures: Sequence[Failure]) -> list[str]:
    """Return one line per group of the other ranks with the same exit status."""
    ranks_by_end: dict[str, list[int]] = {}
    for failure in failures:
        if failure.stopped:
            end_text = "stopped by the launcher"
        else:
            if failure.summary:
                first_sentence = failure.summary.splitlines()[-1].partition(". ")[0]
            else:
                first_sentence = ""
            end_text = end_words(failure.code) + (
                f": {first_sentence}" if first_sentence else ""
            )
        ranks_by_end.setdefault(end_text, []).append(failure.rank)
    return [
        f"{ranks_in_words(ended_ranks)}: {end_text}"
        for end_text, ended_ranks in ranks_by_end.items()
    ]


VERDICT_VARIABLE: Final = "HASTEN_VERDICT_FILE"
"""Variable with the path of the file that receives the reason of a failed launch."""


def write_verdict(words: str, env: Mapping[str, str] | None = None) -> None:
    """Write the reason of a failed launch to the file named by `VARIABLE`; an existing file is not overwritten."""
    verdict_path = (environment.snapshot() if env is None else env).get(
        VERDICT_VARIABLE
    )
    if verdict_path and not Path(verdict_path).exists():
        Path(verdict_path).write_text(words)


def failure_words(failure: Failure, *, many_machines: bool = False) -> str:
    """Return one sentence about the failure that ended the job."""
    host_text = f" on {failure.host}" if many_machines else ""
    host_text += f" (pid {failure.pid})" if failure.pid else ""
    if failure.summary:
        return f"rank {failure.rank}{host_text} failed: {failure.summary} (its traceback is in the output above)"
    if not failure.code:
        return f"rank {failure.rank}{host_text} ended early, while other ranks still needed it; see the output above"
    return f"rank {failure.rank}{host_text} failed: {end_words(failure.code)}; see the output above"
