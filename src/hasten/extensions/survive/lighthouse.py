"""Process of torchft's lighthouse: `python -m hasten.extensions.survive.lighthouse HOST MIN_REPLICAS JOIN_S HEARTBEAT_S`.

It prints its port and serves until its standard input closes, so that it ends with the launcher.
"""

from __future__ import annotations

import socket
import sys
from typing import Final

from hasten.extensions.survive.coordination import TORCHFT_PURPOSE, TORCHFT_VERSIONS
from hasten.optional import need

_QUORUM_TICK_MS: Final = 10
"""Milliseconds between two looks at members that have asked or gone silent."""


def main() -> None:
    """Serve with the options of the command line."""
    host, min_replicas, join_s, heartbeat_s = sys.argv[1:]
    torchft = need("torchft.coordination", TORCHFT_VERSIONS, TORCHFT_PURPOSE)
    with socket.create_server(
        (host, 0)
    ) as probe:  # torchft tells its address with the machine's name, not the port alone
        port = probe.getsockname()[1]
    server = torchft.LighthouseServer(
        bind=f"{host}:{port}",
        min_replicas=int(min_replicas),
        join_timeout_ms=int(float(join_s) * 1000),
        quorum_tick_ms=_QUORUM_TICK_MS,
        heartbeat_timeout_ms=int(float(heartbeat_s) * 1000),
    )
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
