"""A warm launcher for tests: torch is loaded once, then each command becomes `hasten launch` in a fork, if asked on its own host.

Reads one JSON object per line: {namespace, host, folder, argv, output, variables?, hosts_file?}; answers with the fork's pid. The fork's output goes to
the file `output`, its exit code to `output`.code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import hasten.launch.elastic.agent  # noqa: F401 - what makes it warm
from hasten.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from any folder
from tests.support.machines import enter, name_hosts

del sys.path[0]


def run(order: dict[str, str], argv: list[str], variables: dict[str, str]) -> int:
    """Run the command as a launcher of its own would."""
    os.setsid()
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order["folder"])
    if order["namespace"]:
        enter(f"/run/netns/{order['namespace']}", order["host"])
    if order.get("hosts_file"):
        name_hosts(order["hosts_file"])
    os.environ.update(variables)
    return main(argv)


def serve() -> None:
    """Fork for each order until the input ends."""
    # forks report through files, nobody waits for them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        if pid := os.fork():
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = 99
        try:
            code = run(order, order["argv"], order.get("variables", {}))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            draft = Path(order["output"] + ".draft")
            draft.write_text(str(code))
            draft.rename(order["output"] + ".code")
            os._exit(0)


if __name__ == "__main__":
    serve()
