"""Settings files: their locations, parsing of YAML and JSON with line numbers, writing, and the settings of a command."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from hasten.config.base import Section, default_of, meta_of
from hasten.config.checks import Problems
from hasten.config.decode import encode
from hasten.config.established import MARKS, from_accelerate
from hasten.config.handoff import VARIABLE, unpack_settings
from hasten.config.masking import masked_tree
from hasten.config.resolve import Resolved, decode_all, from_tree, resolve
from hasten.config.root import Config
from hasten.config.schema import subsection
from hasten.config.source import Marked, SettingEntry
from hasten.errors import ConfigFileError

_WORDS: Final = MappingProxyType[str, Any](
    {"": None, "~": None, "null": None, "Null": None, "NULL": None}
    | dict.fromkeys(("true", "True", "TRUE"), True)
    | dict.fromkeys(("false", "False", "FALSE"), False)
)
_INTEGER: Final = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_HEX: Final = re.compile(r"0x[0-9a-fA-F]{1,16}")
_FLOAT: Final = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)"
)


def parse_yaml(file_text: str, file_name: str) -> Marked:
    """Return the tree of a settings file, whose top level is always a mapping.

    Raises: ConfigFileError with file and line for invalid YAML, a file that is not a mapping, or a duplicate key.
    """
    if file_text.lstrip().startswith("{"):
        file_text = file_text.replace(
            "\t", " "
        )  # JSON may be indented with tabs, YAML may not
    try:
        yaml_node = yaml.compose(file_text, Loader=yaml.BaseLoader)
    except RecursionError as error:
        raise ConfigFileError(
            f"{file_name}: nested too deeply to be settings; write it flat."
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line_text = f"{file_name}:{mark.line + 1}" if mark else file_name
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigFileError(
            f"{line_text}: not valid YAML or JSON: {problem}; correct the file at this line."
        ) from error
    if yaml_node is None:
        return Marked({}, 1)
    tree = _with_lines(yaml_node, file_name, set())
    if not isinstance(tree.value, Mapping):
        raise ConfigFileError(
            f"{file_name}:{tree.line}: the file holds {'a list' if isinstance(tree.value, list) else 'one value'}, not settings; "
            "write lines of `key: value`."
        )
    return tree


def _with_lines(yaml_node: yaml.Node, file_name: str, visited_ids: set[int]) -> Marked:
    """Return a node and everything below it with line numbers; items of a mapping have those of their keys."""
    line = _line_of(yaml_node)
    # with aliases a short file can hold a value without end
    if id(yaml_node) in visited_ids:
        raise ConfigFileError(
            f"{file_name}:{line}: settings have no aliases; write the value out."
        )
    visited_ids.add(id(yaml_node))
    if isinstance(yaml_node, yaml.SequenceNode):
        return Marked(
            [_with_lines(item, file_name, visited_ids) for item in yaml_node.value],
            line,
        )
    if isinstance(yaml_node, yaml.ScalarNode):
        return Marked(_scalar_value(yaml_node), line)
    marked_values: dict[str, Marked] = {}
    for key_node, value_node in yaml_node.value:
        key = key_node.value
        key_line = _line_of(key_node)
        if not isinstance(key, str):
            raise ConfigFileError(
                f"{file_name}:{key_line}: a key must be a word, not a list or mapping."
            )
        if key in marked_values:
            raise ConfigFileError(
                f"{file_name}:{key_line}: {key!r} is given twice, first on line {marked_values[key].line}; "
                "only one of them could count, so remove the other."
            )
        marked_values[key] = Marked(
            _with_lines(value_node, file_name, visited_ids).value, key_line
        )
    return Marked(marked_values, line)


def _line_of(yaml_node: yaml.Node) -> int:
    mark: Any = yaml_node.start_mark  # Any: PyYAML's own or libyaml's
    return int(mark.line) + 1


def _scalar_value(yaml_node: yaml.ScalarNode) -> Any:
    file_text: str = yaml_node.value
    if yaml_node.style:  # quoted or block text
        return file_text
    if file_text in _WORDS:
        return _WORDS[file_text]
    if _INTEGER.fullmatch(file_text):
        return int(file_text)
    if _HEX.fullmatch(file_text):
        return int(file_text, 16)
    if _FLOAT.fullmatch(file_text):
        return float(
            file_text.replace("_", "")
            .replace(".inf", "inf")
            .replace(".Inf", "inf")
            .replace(".INF", "inf")
        )
    return file_text


SCHEMA: Final = 1
"""Version of the file format this release writes."""
MAX_FILE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """Entries of a settings file, with notes about their translation."""

    path: Path
    kind: str
    entries: tuple[SettingEntry, ...]
    notes: tuple[str, ...] = field(default=())


def home(env: Mapping[str, str]) -> Path:
    """Return the folder of settings: HASTEN_HOME, else `hasten` in the user's folder for configuration."""
    if home_folder := env.get("HASTEN_HOME"):
        return Path(home_folder).expanduser()
    user_folder = Path(env.get("HOME") or "~").expanduser()
    return Path(env.get("XDG_CONFIG_HOME") or user_folder / ".config") / "hasten"


def default_path(env: Mapping[str, str]) -> Path:
    """Return the path of hasten's settings file."""
    return home(env) / "config.yaml"


def accelerate_paths(env: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the paths of Accelerate's settings file, in its search order."""
    user_folder = Path(env.get("HOME") or "~").expanduser()
    cache_folder = Path(env.get("XDG_CACHE_HOME") or user_folder / ".cache")
    folder = (
        Path(env.get("HF_HOME") or cache_folder / "huggingface").expanduser()
        / "accelerate"
    )
    return tuple(
        folder / f"default_config.{ending}" for ending in ("yaml", "yml", "json")
    )


def find(env: Mapping[str, str]) -> Path | None:
    """Return the default settings file: hasten's, else Accelerate's, else None."""
    return next(
        (
            file_path
            for file_path in (default_path(env), *accelerate_paths(env))
            if file_path.is_file()
        ),
        None,
    )


def read(file_path: Path | str) -> SettingsFile:
    """Read the settings of a file of hasten or Accelerate, YAML or JSON.

    Raises: ConfigFileError if it cannot be read or parsed; ConfigError that lists every unknown key with its line.
    """
    file_path = Path(file_path)
    try:
        file_text = read_contents(file_path)
    except FileNotFoundError as error:
        raise ConfigFileError(
            f"no settings file at {file_path}; write one with `hasten config`."
        ) from error
    # ValueError: bytes that are not UTF-8, a path with a NUL
    except (OSError, ValueError) as error:
        raise ConfigFileError(
            f"{file_path} cannot be read: {error}; give a readable YAML or JSON file."
        ) from error
    return read_text(file_text, file_path)


def read_contents(file_path: Path) -> str:
    """Return the text of a settings file; a device, a pipe or a file too large for settings is refused unread."""
    size = file_path.stat().st_size
    if not file_path.is_file():
        raise ConfigFileError(
            f"{file_path} is no regular file, so it holds no settings; give a YAML or JSON file."
        )
    if size > MAX_FILE_BYTES:
        raise ConfigFileError(
            f"{file_path} has {size} bytes, more than the {MAX_FILE_BYTES} that settings may have; give a settings file."
        )
    return file_path.read_text("utf-8")


def read_text(file_text: str, file_path: Path) -> SettingsFile:
    """Return the settings in the text of a file."""
    file_name = str(file_path)
    problems = Problems()
    tree = parse_yaml(file_text, file_name)
    top = dict(tree.value)
    if _is_accelerate(top):
        entries, notes = from_accelerate(tree, file_name, problems)
        kind = "accelerate"
    else:
        _check_version(top.pop("schema", Marked(SCHEMA, 1)), file_name)
        entries = from_tree(Marked(top, 1), file_name, problems)
        notes = []
        kind = "hasten"
    if problems.found:
        # so that wrong values are listed beside the unknown keys
        decode_all(entries, problems)
    problems.settle()
    return SettingsFile(file_path, kind, tuple(entries), tuple(notes))


def _is_accelerate(top: Mapping[str, Marked]) -> bool:
    """Return whether the keys are Accelerate's; a section of hasten beside them means that they only lack their section."""
    if "schema" in top:
        return False
    if "compute_environment" in top or "distributed_type" in top:
        return True
    sections = {
        file_name
        for file_name, spec in Config.__dataclass_fields__.items()
        if subsection(spec.type)
    }
    return bool(top.keys() & MARKS) and not top.keys() & sections


def _check_version(version: Marked, file_name: str) -> None:
    """Raise ConfigFileError unless the file has the version of the format that this release reads."""
    number = version.value
    if isinstance(number, int) and not isinstance(number, bool) and number > SCHEMA:
        raise ConfigFileError(
            f"{file_name}:{version.line}: schema: {number} is newer than this hasten understands ({SCHEMA}), so settings "
            "could be lost; upgrade hasten, or write the file again with `hasten config`."
        )
    if number != SCHEMA or isinstance(number, bool):
        raise ConfigFileError(
            f"{file_name}:{version.line}: schema: {number!r} is not a version; write schema: {SCHEMA}."
        )


def to_mapping(section: Section, *, defaults: bool = False) -> dict[str, Any]:
    """Return settings as plain nested mappings: those that differ from the defaults, or all."""
    tree: dict[str, Any] = {}
    for file_name, spec in section.__dataclass_fields__.items():
        value = getattr(section, file_name)
        if subsection(spec.type):
            if inner := to_mapping(value, defaults=defaults):
                tree[file_name] = inner
        elif not meta_of(type(section), file_name).code_only and (
            defaults or value != default_of(type(section), file_name)
        ):
            tree[file_name] = encode(value)
    return tree


def dump(config: Config, *, as_json: bool = False, masked: bool = False) -> str:
    """Return the settings that differ from the defaults as the text of a file, with `masked` without credentials."""
    tree = {"schema": SCHEMA, **to_mapping(config)}
    tree = masked_tree(tree) if masked else tree
    if as_json:
        return json.dumps(tree, indent=2) + "\n"
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def write(config: Config, file_path: Path | str) -> Path:
    """Write settings to a file, JSON if its name ends in .json, and return its path."""
    file_path = Path(file_path)
    file_path.parent.mkdir(parents=True, exist_ok=True)
    draft = file_path.with_name(f".{file_path.name}.draft")
    draft.write_text(dump(config, as_json=file_path.suffix == ".json"), "utf-8")
    draft.replace(file_path)
    return file_path


def effective_settings(
    env: Mapping[str, str],
    config_file: str | None = None,
    flags: Sequence[SettingEntry] = (),
) -> Resolved:
    """Return the effective settings of a command.

    Inside a launched worker, the launcher's settings replace the file.
    """
    file_path = Path(config_file) if config_file else find(env)
    if config_file is None and (handed := env.get(VARIABLE)):
        return resolve(env=env, flags=flags, handed=unpack_settings(handed))
    if file_path is None:
        return resolve(env=env, flags=flags)
    file = read(file_path)
    return resolve(env=env, flags=flags, file=file.entries, notes=file.notes)
