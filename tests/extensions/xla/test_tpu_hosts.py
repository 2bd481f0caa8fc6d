"""How many machines a TPU slice has: from variables, and from a metadata server that answers as Google's does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from hasten.errors import ConfigError
from hasten.extensions.xla import strategy as xla
from hasten.extensions.xla import tpu_hosts
from hasten.runtime.topology import Topology

POD = {"PJRT_DEVICE": "TPU", "TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}
PATH = "/computeMetadata/v1/instance/attributes/worker-network-endpoints"


@contextmanager
def metadata(
    text: str, status: int = 200, path: str = PATH
) -> Iterator[dict[str, str]]:
    """The variables that lead to a server which gives `text` to those who ask for `path` as Google's server wants to be asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_authorized = (
                self.path == path and self.headers["Metadata-Flavor"] == "Google"
            )
            self.send_response(status if is_authorized else 403)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [("a:1:10.0.0.2,b:2:10.0.0.3", 2), ("a:1:10.0.0.2", 1), ("", None), (" \n", None)],
)
def test_metadata_counts_the_machines(text: str, hosts: int | None) -> None:
    with metadata(text) as env:
        assert tpu_hosts.count_hosts(env) == hosts
        assert (
            tpu_hosts.count_hosts({**env, "http_proxy": "http://127.0.0.1:9"}) == hosts
        )


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("12\n", 12), ("", None), ("none", None)]
)
def test_metadata_knows_this_machines_number(text: str, number: int | None) -> None:
    with metadata(
        text, path=PATH.replace("worker-network-endpoints", "agent-worker-number")
    ) as env:
        assert tpu_hosts.worker_index(env) == number
        assert tpu_hosts.worker_index({**env, "TPU_WORKER_ID": "3"}) == 3
        assert tpu_hosts.worker_index({**env, "TPU_SKIP_MDS_QUERY": "1"}) is None


@pytest.mark.parametrize("chips", [1, 2, 3, 4, 8])
def test_a_machine_becomes_a_world_of_its_own(chips: int) -> None:
    env = {**POD, **tpu_hosts.variables_of_single_host(POD, chips)}
    assert tpu_hosts.count_hosts(env) == 1
    xla.refuse_hosts("TPU", env)
    bounds = env.get("TPU_CHIPS_PER_PROCESS_BOUNDS", "3")
    assert math.prod(map(int, bounds.split(","))) == chips
    assert (
        tpu_hosts.variables_of_single_host(
            {"TPU_CHIPS_PER_PROCESS_BOUNDS": "4,1,1"}, 4
        )["TPU_CHIPS_PER_PROCESS_BOUNDS"]
        == "4,1,1"
    )


def test_who_does_not_answer_knows_nothing() -> None:
    with metadata("a:1:10.0.0.2,b:2:10.0.0.3", status=404) as env:
        assert tpu_hosts.count_hosts(env) is None
    assert tpu_hosts.count_hosts({"GCE_METADATA_HOST": "127.0.0.1:9"}) is None
    assert tpu_hosts.count_hosts({"GCE_METADATA_HOST": "no host"}) is None


def test_variables_come_before_metadata() -> None:
    with metadata("a:1:10.0.0.2") as env:
        assert tpu_hosts.count_hosts({**POD, **env}) == 4
    with metadata("a:1:10.0.0.2,b:2:10.0.0.3") as env:
        assert tpu_hosts.count_hosts({**env, "TPU_SKIP_MDS_QUERY": "1"}) is None
        assert tpu_hosts.count_hosts({**env, "TPU_PROCESS_BOUNDS": "1,1,1"}) == 1


@pytest.mark.parametrize("name", ["TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS"])
def test_a_machine_of_a_slice_may_be_alone(name: str) -> None:
    assert Topology.from_env(POD).world_size == 4
    topology = Topology.from_env({**POD, name: "1,1,1"})
    assert (topology.rank, topology.world_size, topology.node_rank) == (0, 1, 0)
    assert Topology.from_env({**POD, name: "2,2,1"}).world_size == 4
    xla.refuse_hosts("TPU", {**POD, name: "1,1,1"})


def test_a_slice_is_refused_before_xla_waits_for_its_machines() -> None:
    with metadata("a:1:10.0.0.2,b:2:10.0.0.3") as env:
        with pytest.raises(
            ConfigError,
            match=r"this TPU slice has 2 hosts, .* --num_machines 2 .* to use this host by itself",
        ):
            xla.refuse_hosts("TPU", env)
        xla.refuse_hosts("CPU", env)
    with metadata("a:1:10.0.0.2") as env:
        xla.refuse_hosts("TPU", env)
