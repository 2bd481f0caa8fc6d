"""Parsing of YAML and JSON text into a tree with line numbers; words follow YAML 1.2, so that `no` stays a word."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import yaml

from hasten.config.source import Marked
from hasten.errors import ConfigFileError

_WORDS: Final = MappingProxyType[str, Any](
    {"": None, "~": None, "null": None, "Null": None, "NULL": None}
    | dict.fromkeys(("true", "True", "TRUE"), True)
    | dict.fromkeys(("false", "False", "FALSE"), False)
)
_INTEGER: Final = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_HEX: Final = re.compile(r"0x[0-9a-fA-F]{1,16}")
_LOADER: Final = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # libyaml if PyYAML was built with it: 10 times as fast
_MOST_NODES: Final = 20_000  # a file that exceeds this through its aliases is an attack or an accident
_MOST_LEVELS: Final = 100
_MOST_REREAD: Final = 32 * 1024
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)")


def parse(text: str, name: str) -> Marked:
    """Return the tree of a settings file, whose top level is always a mapping.

    Raises: ConfigFileError with file and line for invalid YAML, a file that is not a mapping, or a duplicate key.
    """
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON may be indented with tabs, YAML may not
    try:
        _check_shape(text, name)
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as first:
        error = _in_words(text, first)
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigFileError(f"{place}: not valid YAML or JSON: {problem}; correct the file at this line.") from error
    if node is None:
        return Marked({}, 1)
    tree = YamlReader(name).convert(node, ())
    if not isinstance(tree.value, Mapping):
        raise ConfigFileError(
            f"{name}:{tree.line}: the file holds {'a list' if isinstance(tree.value, list) else 'one value'}, not settings; "
            "write lines of `key: value`."
        )
    return tree


def _in_words(text: str, error: yaml.YAMLError) -> yaml.YAMLError:
    """Return the error of PyYAML's Python parser, which names the characters that libyaml does not."""
    if len(text) <= _MOST_REREAD:
        try:
            for _ in yaml.parse(text, Loader=yaml.BaseLoader):
                pass
        except yaml.YAMLError as clearer:
            return clearer
    return error


def _check_shape(text: str, name: str) -> None:
    """Raise for a text too deep or too large to be settings, before building a tree: libyaml's recursion has no limit."""
    depth = num_nodes = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        num_nodes += isinstance(event, yaml.NodeEvent)
        line = event.start_mark.line + 1
        if depth > _MOST_LEVELS:
            raise ConfigFileError(f"{name}:{line}: nested too deeply to be settings; write it flat.")
        if num_nodes > 2 * _MOST_NODES:  # keys and values
            raise _too_many(name, line)


def _too_many(name: str, line: int) -> ConfigFileError:
    return ConfigFileError(f"{name}:{line}: more than {_MOST_NODES} values; settings are smaller than that.")


@dataclass(slots=True)
class YamlReader:
    """Converter of the nodes of one file to marked values, with a limit for aliases."""

    name: str
    num_nodes: int = 0

    def convert(self, node: yaml.Node, above: tuple[int, ...]) -> Marked:
        """Return a node and everything below it as marked values; `above` holds the ids of its ancestors."""
        line = node.start_mark.line + 1
        self.num_nodes += 1
        if id(node) in above:
            raise ConfigFileError(f"{self.name}:{line}: an alias refers to itself; write the value out.")
        if self.num_nodes > _MOST_NODES:
            raise _too_many(self.name, line)
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            return Marked(self.mapping(node, above), line)
        if isinstance(node, yaml.SequenceNode):
            return Marked([self.convert(item, above) for item in node.value], line)
        assert isinstance(node, yaml.ScalarNode), f"unexpected YAML node {node!r}"
        return Marked(_scalar(node), line)

    def mapping(self, node: yaml.MappingNode, above: tuple[int, ...]) -> dict[str, Marked]:
        """Return the items of a mapping, each with the line of its key."""
        found: dict[str, Marked] = {}
        merged: dict[str, Marked] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigFileError(f"{self.name}:{line}: a key must be a word, not a list or mapping.")
            value = self.convert(value_node, above)
            if key == "<<" and isinstance(value.value, dict):
                merged |= value.value
            elif key in found:
                raise ConfigFileError(
                    f"{self.name}:{line}: {key!r} is given twice, first on line {found[key].line}; "
                    "only one of them could count, so remove the other."
                )
            else:
                found[key] = Marked(value.value, line)
        return merged | found


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.style:  # quoted or block text
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", "").replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf"))
    return text
