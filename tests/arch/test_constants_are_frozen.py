"""Constants of modules cannot change: what the source rules accept as Final is looked at as it really is."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import enum
import importlib
import logging
import re
import struct
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Final

import msgspec
import numpy as np
import packaging.specifiers
import packaging.version
import pytest
import torch

import hasten

FOLDER: Final = Path(hasten.__file__).parent
PLAIN: Final = (
    *(
        str,
        bytes,
        int,
        float,
        complex,
        bool,
        types.NoneType,
        types.EllipsisType,
        enum.Enum,
        range,
        re.Pattern,
        PurePath,
    ),
    *(
        type,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.ModuleType,
        types.GenericAlias,
        types.UnionType,
    ),
    *(
        typing.TypeVar,
        typing.ParamSpec,
        logging.Logger,
        logging.LoggerAdapter,
        msgspec.json.Decoder,
        msgspec.json.Encoder,
    ),
    *(
        torch.dtype,
        torch.device,
        torch.Size,
        np.generic,
        struct.Struct,
        datetime.timedelta,
        packaging.version.Version,
        packaging.specifiers.SpecifierSet,
    ),
)


def is_immutable(value: object) -> bool:
    """Say whether a value, with everything inside it, stays as it is."""
    match value:
        case tuple() | frozenset():
            return all(is_immutable(member) for member in value)
        case types.MappingProxyType():
            return all(
                is_immutable(key) and is_immutable(member)
                for key, member in value.items()
            )
        case msgspec.Struct():
            return value.__struct_config__.frozen and all(
                is_immutable(getattr(value, f)) for f in value.__struct_fields__
            )
    if (
        isinstance(value, PLAIN)
        or type(value) is object
        or type(value).__module__ == "typing"
    ):
        return True
    if dataclasses.is_dataclass(value):
        fixed: bool = value.__dataclass_params__.frozen  # type: ignore[union-attr]
        return fixed and all(
            is_immutable(getattr(value, field.name))
            for field in dataclasses.fields(value)
        )
    holds_nothing = getattr(type(value), "__slots__", None) == ()
    return holds_nothing or (
        isinstance(value, Callable) and not hasattr(value, "__dict__")  # type: ignore[arg-type]
    )


def assigned_names(file: Path) -> Iterator[str]:
    """Yield the names that a module assigns at its top level."""
    for node in ast.parse(file.read_text("utf-8")).body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        yield from (
            target.id
            for target in targets
            if isinstance(target, ast.Name) and not target.id.startswith("__")
        )


def test_every_module_constant_is_frozen() -> None:
    complaints = []
    for file in sorted(FOLDER.rglob("*.py")):
        names = list(assigned_names(file))
        if not names:
            continue
        dotted = ".".join(
            ("hasten", *file.relative_to(FOLDER).with_suffix("").parts)
        ).removesuffix(".__init__")
        module = importlib.import_module(dotted)
        complaints += [
            f"{dotted}.{name} is a {type(vars(module)[name]).__name__} that can change"
            for name in names
            if name in vars(module) and not is_immutable(vars(module)[name])
        ]
    assert not complaints, "\n".join(complaints)


@dataclasses.dataclass(frozen=True)
class FrozenShell:
    """A value that cannot be rebound but may hold something that changes."""

    inside: object


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        set(),
        ([],),
        FrozenShell([]),
        types.MappingProxyType({"a": []}),
        iter("a"),
    ],
)
def test_changing_values_are_seen(value: object) -> None:
    assert not is_immutable(value)


@pytest.mark.parametrize(
    "value",
    [
        1,
        "a",
        (1, ("b",)),
        FrozenShell((1,)),
        types.MappingProxyType({"a": 1}),
        torch.float32,
        object(),
    ],
)
def test_fixed_values_are_accepted(value: object) -> None:
    assert is_immutable(value)
