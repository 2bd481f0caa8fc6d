"""`hasten migrate`: names change, everything else stays, and what behaves differently is named."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from hasten import Accelerator
from hasten.cli.main import main
from hasten.extensions.migrate import command as migrate_cmd
from hasten.extensions.migrate.migrating import FUNCTIONS, NOTES, migrate

SCRIPT = """# héader: a comment with accelerate in it
from accelerate import Accelerator, DataLoaderConfiguration  # two names
from accelerate.utils import (
    set_seed,  # the seed
)
import accelerate

accelerate.utils.set_seed(1)
text = "ünïcode", accelerate.skip_first_batches
accelerator = Accelerator(cpu = True)   # odd spacing stays
"""


def test_only_names_change() -> None:
    done = migrate(SCRIPT)
    assert done.text == SCRIPT.replace(
        "from accelerate.utils import", "from hasten import"
    ).replace("from accelerate import", "from hasten import").replace(
        "import accelerate\n", "import hasten\n"
    ).replace("accelerate.utils.set_seed(1)", "hasten.set_seed(1)").replace(
        "accelerate.skip_first_batches", "hasten.skip_first_batches"
    )
    assert done.findings == ()


def test_a_script_without_accelerate_is_left_alone() -> None:
    text = "import torch\naccelerate = 3\nprint(accelerate)\n"
    assert migrate(text).text == text


def test_names_that_hasten_lacks_stay_and_are_said() -> None:
    done = migrate(
        "from accelerate.state import (\n    PartialState,  # kept\n    set_seed as seed,\n)\n"
    )
    assert (
        done.text
        == "# kept\nfrom hasten import set_seed as seed\nfrom accelerate.state import PartialState\n"
    )
    ast.parse(done.text)
    assert [(one.line, "PartialState" in one.text) for one in done.findings] == [
        (1, True)
    ]


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_names_that_hasten_has_elsewhere_are_said_with_their_home(name: str) -> None:
    done = migrate(
        f"import accelerate\nfrom accelerate.utils import {name}\naccelerate.utils.set_seed(1)\n"
    )
    said = [one.text for one in done.findings if "separate settings" not in one.text]
    assert said == [f"accelerate.utils.{name} stays; {FUNCTIONS[name]}"]
    for owner, found in re.findall(
        r"(accelerator|hasten(?:\.\w+)*)\.(\w+)", FUNCTIONS[name]
    ):
        assert hasattr(
            import_module(owner) if owner != "accelerator" else Accelerator(cpu=True),
            found,
        )


def test_modules_of_accelerate_are_not_taken_for_names() -> None:
    done = migrate("import accelerate\naccelerate.big_modeling.dispatch_model\n")
    assert (done.text, done.findings) == (
        "import hasten\nhasten.bigmodel.dispatch_model\n",
        (),
    )
    [found] = migrate("from accelerate import utils\n").findings
    assert (
        found.text
        == "the module accelerate.utils stays; import names from hasten instead"
    )


@pytest.mark.parametrize("method", sorted(NOTES))
def test_every_method_that_differs_is_named(method: str) -> None:
    done = migrate(
        f"from accelerate import Accelerator\na = Accelerator()\na.{method}()\n"
    )
    assert any(one.line == 3 and method in one.text for one in done.findings)


@pytest.mark.parametrize(
    "line",
    [
        "AutocastKwargs().to_kwargs()",
        "ParallelismConfig().total_size",
        "ParallelismConfig().build_device_mesh('cpu')",
        "DeepSpeedPlugin().deepspeed_config_process()",
        "model.hf_device_map",
        "Accelerator().prepare(optimizer)",
        "Accelerator().distributed_type",
        "get_logger('x')",
    ],
)
def test_what_other_objects_lack_or_do_otherwise_is_named(line: str) -> None:
    imports = "from accelerate import Accelerator, ParallelismConfig\nfrom accelerate.logging import get_logger\n"
    [found] = migrate(f"{imports}{line}\n").findings
    assert found.line == 3
    assert migrate(f"{line}\n").findings == ()


def test_arguments_and_attributes_that_hasten_lacks_are_named() -> None:
    done = migrate(
        "from accelerate import Accelerator\n"
        "from accelerate.utils import ProjectConfiguration\n"
        "accelerator = Accelerator(project_config=ProjectConfiguration(surprise=True))\n"
        "accelerator.state.num_processes\n"
        "accelerator.prepare(model, lr_scheduler)\n"
        "accelerator.reduce(loss, scale=2.0)\n"
    )
    said = {one.line: one.text for one in done.findings}
    assert "surprise" in said[3]
    assert "no state" in said[4]
    assert "once per update" in said[5]
    assert "scale" in said[6]


def test_the_command_prints_a_diff_and_writes_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(b"from accelerate import Accelerator\r\nprint(Accelerator)\r\n")
    assert main(["migrate", str(tmp_path)]) == 0
    assert "+from hasten import Accelerator" in capsys.readouterr().out
    assert b"accelerate" in script.read_bytes()
    assert main(["migrate", str(script), "--write"]) == 0
    assert (
        script.read_bytes()
        == b"from hasten import Accelerator\r\nprint(Accelerator)\r\n"
    )


def test_findings_make_the_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("from accelerate import PartialState\n")
    assert migrate_cmd.main([str(script)]) == 1
    assert f"{script}:1: accelerate.PartialState" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [("accelerate = (\n", "is not valid Python"), (None, "does not exist")],
)
def test_what_cannot_be_migrated_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    assert main(["migrate", str(script)]) == 2
    assert said in capsys.readouterr().err


def test_names_of_public_modules_are_imported_from_there() -> None:
    text = (
        "import accelerate as acc\n"
        "import accelerate\n"
        "from accelerate import Accelerator, cpu_offload, init_empty_weights\n"
        "from accelerate.big_modeling import dispatch_model  # one\n"
        "from accelerate.hooks import ModelHook\n"
        "acc.utils.set_module_tensor_to_device, accelerate.disk_offload\n"
    )
    done = migrate(text)
    assert done.text.splitlines() == [
        "import hasten as acc",
        "import hasten",
        "from hasten import Accelerator, init_empty_weights",
        "from hasten.bigmodel import cpu_offload",
        "from hasten.bigmodel import dispatch_model  # one",
        "from hasten.extending import ModelHook",
        "acc.bigmodel.set_module_tensor_to_device, hasten.bigmodel.disk_offload",
    ]
    exec(compile(done.text, "script", "exec"), {})  # every name exists


def test_scripts_without_accelerate_are_said_to_need_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain.py").write_text("import torch\n")
    assert main(["migrate", str(tmp_path)]) == 0
    assert "uses accelerate, so there is nothing to migrate" in capsys.readouterr().err
