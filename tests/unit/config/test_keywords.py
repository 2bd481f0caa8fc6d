"""The Accelerator's keyword arguments: each setting has one name in code, a type and a description."""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path
from typing import Any, cast

import pytest

from hasten import Accelerator, FullyShardedDataParallelPlugin, TrustSettings
from hasten.config.base import Section, given
from hasten.config.files import read
from hasten.config.resolve import (
    ARGUMENTS,
    HANDLERS,
    MOVED,
    argument_names,
    from_code,
    resolve,
)
from hasten.config.root import Config
from hasten.config.schema import section_at
from hasten.errors import ConfigError, UnknownSettingError

SIGNATURE = [
    name
    for name in inspect.signature(Accelerator).parameters
    if name != "extension_settings"
]
KEYWORDS = [*argument_names(), "context"]
"""Every argument, those of extensions included."""


def test_every_setting_has_one_keyword() -> None:
    assert set(SIGNATURE) <= set(KEYWORDS)
    assert len(SIGNATURE) <= 26
    assert not MOVED & set(KEYWORDS)
    sections = [
        ARGUMENTS.get(name, (name,))
        for name in KEYWORDS
        if section_at(ARGUMENTS.get(name, (name,)))
    ]
    assert len(sections) == len(set(sections)), "a section under two names"
    # the launcher's own settings
    reached = {path[0] for path in (*sections, *HANDLERS.values())} | {"launch"}
    assert {
        name for name in Config.__dataclass_fields__ if section_at((name,))
    } == reached


def test_a_section_is_typed_as_its_class() -> None:
    hints = typing.get_type_hints(Accelerator.__init__)
    for name in SIGNATURE:
        section = section_at(ARGUMENTS.get(name, (name,)))
        classes = {
            kind
            for kind in typing.get_args(hints[name])
            if isinstance(kind, type) and issubclass(kind, Section)
        }
        assert classes == ({section} if section else set()), name


def test_every_keyword_is_described() -> None:
    text = inspect.getdoc(Accelerator) or ""
    described = re.findall(r"^    (\w+): \S", text, re.MULTILINE)
    assert described == [*SIGNATURE, "extension_settings"], (
        "in the order of the signature"
    )


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_name_of_files_names_its_spelling_in_code(name: str) -> None:
    with pytest.raises(
        UnknownSettingError,
        match=rf"Accelerator\({name}=.*is not an argument.*; write ",
    ) as caught:
        Accelerator(**cast(Any, {name: {}}))
    if suggestion := re.search(r"write (\w+)=", str(caught.value)):
        assert suggestion[1] in KEYWORDS


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("fsdp", "fsdp_plugin=FullyShardedDataParallelPlugin(...)"),
        ("ddp", "kwargs_handlers=[DistributedDataParallelKwargs(...)]"),
        ("numbers_spike", "trust=TrustSettings(numbers_spike=...)"),
        ("launch", "a flag of `hasten launch`"),
    ],
)
def test_spellings_in_code(name: str, spelling: str) -> None:
    with pytest.raises(UnknownSettingError) as caught:
        from_code({name: "off"})
    assert spelling in str(caught.value)


@pytest.mark.parametrize(
    ("value", "policies"),
    [
        ("off", ("off", "off", "off")),
        ("report", ("report", "report", "report")),
        ({"stall": "report"}, ("report", "stop", "report")),
        (TrustSettings(numbers="stop"), ("abort", "stop", "stop")),
    ],
)
def test_trust_is_a_word_a_mapping_or_its_class(
    value: Any, policies: tuple[str, str, str]
) -> None:
    trust = resolve(code={"trust": value}).config.trust
    assert (trust.stall, trust.divergence, trust.numbers) == policies


def test_a_word_that_one_check_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trust.*expected one of abort, report, off"):
        resolve(code={"trust": "stop"})
    with pytest.raises(ConfigError, match="3 settings are wrong"):
        resolve(code={"trust": "on"})


def test_trust_in_a_file_and_in_variables(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("schema: 1\ntrust: off\n")
    trust = resolve(
        file=read(tmp_path / "a.yaml").entries, env={"HASTEN_TRUST_NUMBERS": "skip"}
    ).config.trust
    assert (trust.stall, trust.divergence, trust.numbers) == ("off", "off", "skip")
    (tmp_path / "b.yaml").write_text("schema: 1\nstall: off\n")
    with pytest.raises(
        ConfigError,
        match=r"b.yaml:2: unknown setting 'stall'.*belongs under 'trust.stall'",
    ):
        read(tmp_path / "b.yaml")


def test_replaced_settings_keep_which_were_given() -> None:
    section = FullyShardedDataParallelPlugin(cpu_offload=True).replace(
        hybrid_shard=True
    )
    assert given(section) == {"cpu_offload", "hybrid_shard"}
    assert section == FullyShardedDataParallelPlugin(
        cpu_offload=True, hybrid_shard=True
    )
