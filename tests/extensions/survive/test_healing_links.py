"""A replica that waits for the state of another one notices that the link to it was cut."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support.machines import hosts, why_impossible

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(why_impossible()), reason="needs root and network namespaces"
    ),
]

SOURCE = """
import time
from hasten.extensions.survive.healing import HealingPort
port = HealingPort("{address}", None)
print(port.address, flush=True)
time.sleep(300)
"""
WAITING = """
import time
from hasten.extensions.survive.healing import HealingPort, NotHealedError
port = HealingPort("{address}", None)
print("waiting", flush=True)
try:
    port.receive("{source}", "7", 120.0, 3.0)
except NotHealedError as error:
    print(time.time(), error, flush=True)
"""


def start(namespace: str, program: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_cut_link_to_the_source_of_a_state_is_noticed_within_seconds() -> None:
    with hosts(2) as (receiver, sender):
        source = start(sender.namespace, SOURCE.format(address=sender.address))
        waiting = start(
            receiver.namespace,
            WAITING.format(address=receiver.address, source=line_of(source)),
        )
        try:
            assert line_of(waiting) == "waiting"
            time.sleep(1.5)
            assert waiting.poll() is None, (
                "the connection of a source that is there must not end"
            )
            cut = time.time()
            sender.unplug()
            when, _, message = line_of(waiting).partition(" ")
            assert "is cut off" in message
            assert float(when) - cut < 10, "the probes end after about three seconds"
        finally:
            for process in (source, waiting):
                process.kill()
                process.communicate()
