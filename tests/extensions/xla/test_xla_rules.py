"""What strategy='xla' refuses, and in which words; nothing here needs torch_xla."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.config.resolve import resolve
from hasten.errors import ConfigError, MissingPackageError
from hasten.extensions.xla import strategy as xla
from hasten.extensions.xla.placing import Devices
from hasten.optional import available
from hasten.runtime.topology import Topology


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cpu": True}, "cpu is not supported .* set PJRT_DEVICE=CPU"),
        (
            {"dynamo.backend": "inductor"},
            "dynamo.backend is not supported .* XLA always compiles every step",
        ),
        (
            {"recompute": ("Block",)},
            "recompute is not supported .* not tested with XLA",
        ),
        (
            {"ddp.bucket_cap_mb": 5},
            "the section ddp is not supported .* XLA reduces gradients",
        ),
        ({"performance": "auto"}, "performance is not supported .* for other devices"),
    ],
)
def test_settings_without_effect_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    config = resolve(code={"strategy": "xla", **settings}).config
    with pytest.raises(ConfigError, match=words):
        xla.refuse_unsupported_settings(config)


@pytest.mark.parametrize(
    "settings", [{"fsdp.reshard_after_forward": False}, {"parallelism.tp_size": 2}]
)
def test_options_of_other_strategies_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"strategy: xla .* contradicts"):
        resolve(code={"strategy": "xla", **settings})


def test_other_settings_pass() -> None:
    xla.refuse_unsupported_settings(
        resolve(
            code={"strategy": "xla", "mixed_precision": "bf16", "xla.fsdp_v2": True}
        ).config
    )


def test_one_process_drives_a_host() -> None:
    xla.refuse_processes(Topology())
    with pytest.raises(
        ConfigError,
        match=r"4 processes were started .* `hasten launch --tpu script.py`",
    ):
        xla.refuse_processes(
            Topology(
                rank=1, world_size=4, local_rank=1, local_world_size=4, source="torch"
            )
        )
    pod = Topology.from_env(
        {"PJRT_DEVICE": "TPU", "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}
    )
    with pytest.raises(
        ConfigError, match=r"this TPU slice has 4 hosts, .* --num_machines 4 "
    ):
        xla.refuse_processes(pod)
    xla.refuse_processes(Topology(rank=1, world_size=4, node_rank=1, source="torch"))


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.9.0+cu128", True), ("2.9.1", True), ("2.11.0", False), ("2.8.0", False)],
)
def test_only_the_torch_of_its_number(version: str, fits: bool) -> None:
    if fits:
        xla.refuse_other_torch(version)
    else:
        with pytest.raises(
            MissingPackageError,
            match=f"torch {version} .* needs torch 2.9.*docs/tpu.md",
        ):
            xla.refuse_other_torch(version)


@pytest.mark.skipif(available("torch_xla"), reason="torch_xla is installed")
def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(code={"strategy": "xla"}).config
    with pytest.raises(
        MissingPackageError, match="Create a separate environment for TPUs"
    ):
        xla.start_xla(config, Topology())
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    with pytest.raises(
        MissingPackageError,
        match=r"'torch_xla' is not installed.*Run: pip install 'torch_xla>=2.9,<2.10'",
    ):
        xla.start_xla(config, Topology())


def test_only_even_parts_are_shared() -> None:
    four, single = (
        Devices(4, "TPU", torch.device("cpu"), None),
        Devices(1, "TPU", torch.device("cpu"), None),
    )
    assert [size for size in range(13) if four.divides_evenly(size)] == [4, 8, 12]
    assert not any(single.divides_evenly(size) for size in range(13))
