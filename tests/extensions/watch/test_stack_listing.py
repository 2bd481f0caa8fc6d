"""Listing another thread's stack does not deadlock with a garbage collection."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import faulthandler, gc, os, threading, time
from hasten.extensions.watch import stacks

faulthandler.dump_traceback_later(20, exit=True)

class Releases:
    "An object in a cycle whose finalizer releases the interpreter's lock, as closing a socket does."
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0.0005)

def starts_and_ends():
    while True:
        threads = [threading.Thread(target=int) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

threading.Thread(target=starts_and_ends, daemon=True).start()
gc.set_threshold(1, 1, 1)
me = threading.get_ident()
until = time.monotonic() + 3.0
while time.monotonic() < until:
    Releases()
    assert stacks.calls_of(me)
assert gc.isenabled()
print("listed", flush=True)
os._exit(0)
"""


def test_a_collection_while_stacks_are_listed_does_not_deadlock() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "listed", done.stderr[-2000:]
