"""Measured link speeds replace the table's in a plan; a file that holds none is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.errors import ConfigError
from hasten.extensions.planning.plan import hardware
from hasten.extensions.planning.plan.speed import predict_time
from hasten.extensions.planning.plan.traced import Candidate
from hasten.launch.links import Links, read_links
from hasten.runtime.mesh_plan import MeshSpec
from tests.extensions.planning.plan.llama import llama


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for links in (
        Links(
            device="NVIDIA H200",
            machines=2,
            per_machine=8,
            node_gb_s=301.5,
            network_gb_s=21.0,
        ),
        Links(device="cpu", machines=1, per_machine=2, node_gb_s=0.3),
    ):
        links.write(tmp_path / "links.yaml")
        assert read_links(tmp_path / "links.yaml") == links


def test_the_table_measured_exactly_changes_nothing() -> None:
    table = hardware.find_accelerator("h200")
    equal_links = Links(
        device="NVIDIA H200",
        machines=2,
        per_machine=8,
        node_gb_s=table.node_gb_s * table.link_share,
        network_gb_s=table.network_gb_s * table.link_share,
    )
    # nothing measured: the table's speeds
    for links in (equal_links, Links(device="cpu", machines=1, per_machine=1)):
        for mesh in (
            MeshSpec(dp_shard=8),
            MeshSpec(dp_shard=64),
            MeshSpec(dp_shard=16, tp=4),
        ):
            layout = Candidate(mesh=mesh, sharded=True, precision="bf16")
            expected = predict_time(llama(), layout, table).total
            assert predict_time(
                llama(), layout, hardware.with_links(table, links)
            ).total == pytest.approx(expected)


def test_a_slower_network_makes_a_slower_plan() -> None:
    table, layout = (
        hardware.find_accelerator("h200"),
        Candidate(mesh=MeshSpec(dp_shard=64), sharded=True, precision="bf16"),
    )
    times = [
        predict_time(
            llama(),
            layout,
            hardware.with_links(
                table, Links(device="", machines=8, per_machine=8, network_gb_s=speed)
            ),
        )
        for speed in (30.0, 3.0, 0.3)
    ]
    assert times[0].exposed < times[1].exposed < times[2].exposed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "node_gb_s: 3",
        "{",
        "device: a\nmachines: 1\nper_machine: 2\nnode_gb_s: -1\nnetwork_gb_s: null",
    ],
)
def test_a_file_without_link_speeds_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "links.yaml").write_text(text)
    with pytest.raises(ConfigError, match="measure them with `hasten test --links"):
        read_links(tmp_path / "links.yaml")
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read"):
        read_links(tmp_path / "absent.yaml")
