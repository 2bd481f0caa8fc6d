"""`hasten launch --submit queue train.py`: print a job file for the cluster's queue."""

import shlex

from hasten.extending import (
    Config,
    Host,
    LaunchPlan,
    LaunchRequest,
    LaunchTarget,
    PlannedFile,
)


def plan(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a plan whose only content is the job file."""
    num_processes = request.config.launch.num_processes or 1
    command = [
        "hasten",
        "launch",
        f"--num_processes={num_processes}",
        request.target.name,
        *request.target.args,
    ]
    text = f"#!/bin/sh\n#QUEUE processes={num_processes}\nexec {shlex.join(command)}\n"
    return LaunchPlan(
        launcher="queue",
        procs=(),
        files=(PlannedFile("job.sh", text),),
        target=request.target,
    )


def print_job(plan: LaunchPlan, config: Config, host: Host) -> int:
    """Print the job file; return the exit code of the command."""
    print(plan.files[0].text, end="")
    return 0


TARGET = LaunchTarget(
    name="queue",
    is_chosen=lambda request: request.config.launch.submit == "queue",
    plan=plan,
    run=print_job,
)
