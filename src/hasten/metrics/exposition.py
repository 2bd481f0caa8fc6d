"""Metric families and their Prometheus text format: rendering, and strict parsing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from hasten.errors import ConfigError

MetricKind = Literal["gauge", "counter"]
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
_SPECIAL: Final = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One value with its labels, beside those of the process."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """All samples of one name."""

    name: str
    kind: MetricKind
    help: str
    samples: Sequence[Sample]
    unit: str = ""
    """Unit in the notation of UCUM, as OTLP has it; empty for none."""


@dataclass(frozen=True, slots=True)
class ParsedSample:
    """One line of a text in Prometheus format."""

    name: str
    labels: Mapping[str, str]
    value: float


def render(families: Sequence[MetricFamily], labels: Mapping[str, str]) -> str:
    """Return the text of all families that have samples; `labels` are added to every sample."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}"]
        for sample in family.samples:
            inside = ",".join(f'{key}="{_escaped(value)}"' for key, value in {**labels, **sample.labels}.items())
            lines.append(f"{family.name}{{{inside}}} {number(sample.value)}")
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Return a value as the format spells it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def parse(text: str) -> list[ParsedSample]:
    """Return the samples of a text in Prometheus format.

    Raises: ConfigError for a line that is not in this format, and for a sample that appears twice.
    """
    found: list[ParsedSample] = []
    seen = set[tuple[str, tuple[tuple[str, str], ...]]]()
    for row, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        sample = _sample(line)
        if sample is None:
            raise ConfigError(
                f"line {row} is not in Prometheus's text format: {line[:120]!r}; the address serves something else. Give the host and port of "
                "a training with metrics.port."
            )
        key = (sample.name, tuple(sorted(sample.labels.items())))
        if key in seen:
            raise ConfigError(
                f"line {row} repeats the sample {line[:120]!r}, so its value is not defined; read a training of one version of hasten."
            )
        seen.add(key)
        found.append(sample)
    return found


def _sample(line: str) -> ParsedSample | None:
    name = _NAME.match(line)
    if name is None:
        return None
    rest, labels = line[name.end() :], dict[str, str]()
    if rest.startswith("{"):
        at = 1
        while found := _LABEL.match(rest, at):
            labels[found[1]] = _SPECIAL.sub(lambda one: "\n" if one[1] == "n" else one[1], found[2])
            at = found.end() + rest.startswith(",", found.end())
        if not rest.startswith("}", at):
            return None
        rest = rest[at + 1 :]
    values = rest.split()
    if not rest.startswith(" ") or len(values) not in (1, 2):
        return None
    try:
        return ParsedSample(name[0], labels, float(values[0]))
    except ValueError:
        return None
