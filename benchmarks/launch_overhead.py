"""What starting an empty script on two processes costs: hasten beside torchrun and, where it is installed, Accelerate.

    python benchmarks/launch_overhead.py [--rounds 9] [--accelerate PATH_OF_ITS_COMMAND]

The launchers take turns, so that a busy moment of the machine hits all of them; wall time and CPU time (of the launcher and
everything it started) are told, each as median and as best. Results go to benchmarks/results/launch_overhead.{json,md}.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recording import record_run


def contender_commands(script: str, accelerate: str | None) -> dict[str, list[str]]:
    """The contenders: two CPU processes of one empty script."""
    folder = Path(sys.executable).parent
    command_lines = {
        "torchrun": [str(folder / "torchrun"), "--nproc_per_node", "2", script],
        "hasten launch": [
            str(folder / "hasten"),
            "launch",
            "--cpu",
            "--num_processes",
            "2",
            script,
        ],
        "hasten launch, 1 process": [str(folder / "hasten"), "launch", "--cpu", script],
        "hasten launch --help": [str(folder / "hasten"), "launch", "--help"],
    }
    if accelerate:
        options = [
            "--cpu",
            "--num_processes",
            "2",
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
        ]
        command_lines["accelerate launch (starts one process)"] = [
            accelerate,
            "launch",
            *options,
            script,
        ]
    return command_lines


def measure_command(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Seconds of wall time and of CPU time, children included."""
    initial_usage, start = (
        resource.getrusage(resource.RUSAGE_CHILDREN),
        time.perf_counter(),
    )
    subprocess.run(command, check=True, capture_output=True, env=env)
    wall, final_usage = (
        time.perf_counter() - start,
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    return (
        wall,
        final_usage.ru_utime
        + final_usage.ru_stime
        - initial_usage.ru_utime
        - initial_usage.ru_stime,
    )


def format_table(rows: dict[str, dict[str, float]]) -> str:
    """The results as Markdown."""
    base = rows["torchrun"]
    lines = [
        "| launcher | wall median s | wall best s | CPU median s | CPU best s | wall / torchrun | CPU / torchrun |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [
            f"{row[key]:.2f}"
            for key in ("wall_median_s", "wall_best_s", "cpu_median_s", "cpu_best_s")
        ]
        cells += [
            f"{row['wall_median_s'] / base['wall_median_s']:.2f}",
            f"{row['cpu_median_s'] / base['cpu_median_s']:.2f}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--accelerate", help="the accelerate command of another environment"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "empty.py"
        script.write_text("")
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HASTEN_HOME": folder,
            "HF_HOME": folder,
        }
        contenders = contender_commands(str(script), args.accelerate)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for turn in range(args.rounds + 1):
            for name, command in contenders.items():
                measured_times = measure_command(command, env)
                if turn:  # the first turn warms the disk's cache
                    times[name].append(measured_times)
    rows = {
        name: {
            "wall_median_s": statistics.median(wall for wall, _ in measured_times),
            "wall_best_s": min(wall for wall, _ in measured_times),
            "cpu_median_s": statistics.median(cpu for _, cpu in measured_times),
            "cpu_best_s": min(cpu for _, cpu in measured_times),
        }
        for name, measured_times in times.items()
    }
    version = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {version}, {args.rounds} rounds"
    text = format_table(rows)
    page = f"# Starting an empty script on two processes\n\n{machine}\n\n{text}\n"
    record_run(
        "launch_overhead",
        "cpu",
        {"machine": machine, "rows": rows},
        page,
        {"torch": version},
    )
    print(f"{machine}\n\n{text}")


if __name__ == "__main__":
    main()
