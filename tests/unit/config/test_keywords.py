"""The Accelerator's typed keyword arguments are the settings of the schema, no more and no fewer."""

from __future__ import annotations

import inspect
import typing

from hasten import Accelerator
from hasten.config.base import Section
from hasten.config.keywords import Keywords
from hasten.config.layers import ARGUMENTS
from hasten.config.root import Config
from hasten.config.schema import section_at


def test_every_setting_is_a_keyword() -> None:
    listed = set(inspect.signature(Accelerator).parameters) - {"settings", "context", "kwargs_handlers"}
    assert listed.isdisjoint(Keywords.__annotations__)
    assert listed | set(Keywords.__annotations__) == set(Config.__dataclass_fields__) | set(ARGUMENTS)


def test_a_section_is_typed_as_its_class() -> None:
    for name, hint in typing.get_type_hints(Keywords).items():
        section = section_at(ARGUMENTS.get(name, (name,)))
        classes = {kind for kind in typing.get_args(hint) if isinstance(kind, type) and issubclass(kind, Section)}
        assert classes == ({section} if section else set()), name
