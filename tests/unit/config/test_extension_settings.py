"""Settings of extensions: a section that an extension offers is read from files, flags, variables and code like the core's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SETTINGS = """
from hasten.config.base import Section, SectionNames, setting, settings

@settings
class FarmSettings(Section):
    section_names = SectionNames(argument="farm", word_fields=("queue",), flag_group="the farm")
    queue: str = setting("short", "queue of the job")
    nodes: int = setting(1, "machines of the job", minimum=1)
"""
CHECK = """
import pickle, sys
from pathlib import Path
from hasten import extension
farm = extension.Extension(name="farm", summary="our farm", settings={"farm": "farm:FarmSettings", "launch.field": "farm:FarmSettings"})
gone = extension.Extension(name="gone", summary="broken", settings={"gone": "no_such_module:Settings"})
extension.installed = lambda: (farm, gone)
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from hasten.config import files, handoff
    from hasten.config.resolve import resolve
assert "no_such_module" in str(caught[0].message), caught
from farm import FarmSettings
from hasten.cli.launch_cmd import make_parser

file = files.read_text("farm: long\\nlaunch:\\n  field:\\n    nodes: 3\\n", Path("config.yaml"))
flags = make_parser().parse_args(["--farm_nodes", "7", "train.py"]).settings
resolved = resolve(file=file.entries, flags=flags, env={"HASTEN_FARM_NODES": "5"})
assert (resolved.config.farm.queue, resolved.config.farm.nodes, resolved.config.launch.field.nodes) == ("long", 7, 3)
assert resolved.config.section(FarmSettings) is resolved.config.launch.field
assert resolved.config == pickle.loads(pickle.dumps(resolved.config)) != resolve().config
assert resolve(code={"farm": FarmSettings(nodes=2)}).config.farm.nodes == 2
assert resolve(handed=handoff.unpack_settings(handoff.pack_settings(resolved.entries))).config == resolved.config
assert "the farm" in make_parser().format_help()
assert "queue: long" in files.dump(resolved.config)
"""


def test_a_section_of_an_extension_is_read_from_every_source(tmp_path: Path) -> None:
    (tmp_path / "farm.py").write_text(SETTINGS)
    subprocess.run([sys.executable, "-c", CHECK], cwd=tmp_path, check=True)
