"""`use_liger_kernel`: kernels are replaced where the package and a GPU are there; else one sentence says why not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hasten.errors import ConfigError, ContradictionError, MissingPackageError
from hasten.extensions.trainer.trainer import apply_liger
from hasten.optional import available
from hasten.trainer import Trainer, TrainingArguments

TABLE = """
MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
seen = []
def _apply_liger_kernel_to_instance(model, **options):
    seen.append((model, options))
"""


class Model(nn.Linear):
    def __init__(self, kind: str = "llama") -> None:
        super().__init__(2, 2)
        self.config = SimpleNamespace(model_type=kind)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the patching module of a package in the place of liger-kernel, whose own needs Triton to be imported."""
    folder = tmp_path / "liger_kernel" / "transformers"
    folder.mkdir(parents=True)
    for one in (folder.parent, folder):
        (one / "__init__.py").touch()
    (folder / "monkey_patch.py").write_text(TABLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, name)
    yield lambda: sys.modules["liger_kernel.transformers.monkey_patch"]
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        del sys.modules[name]


def test_the_packages_function_gets_the_model_and_the_options(package: Any) -> None:
    model = Model()
    apply_liger(model, {"rope": False}, torch.device("cuda"))
    assert package().seen == [(model, {"rope": False})]


def test_an_adapters_model_is_patched_inside(package: Any) -> None:
    inner = Model()
    outer: Any = nn.Sequential(inner)
    outer.get_base_model = lambda: inner
    apply_liger(outer, {}, torch.device("cuda"))
    assert package().seen == [(inner, {})]


def test_models_and_devices_without_kernels_are_named(package: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no kernels for Model \(model_type='own'\).*use_chunked_loss",
    ):
        apply_liger(Model("own"), {}, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"a cpu device cannot run; remove it"):
        apply_liger(Model(), {}, torch.device("cpu"))


@pytest.mark.skipif(available("liger_kernel"), reason="liger-kernel is installed")
def test_a_missing_package_is_named_by_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(
        MissingPackageError,
        match=r"'liger_kernel' is not installed.*use_liger_kernel=True",
    ):
        Trainer(
            Model(),
            TrainingArguments(str(tmp_path), use_liger_kernel=True, use_cpu=True),
        )


def test_options_without_the_kernels_have_no_effect(tmp_path: Path) -> None:
    with pytest.raises(ContradictionError, match="it needs use_liger_kernel=True"):
        TrainingArguments(str(tmp_path), liger_kernel_config={"rope": True})
