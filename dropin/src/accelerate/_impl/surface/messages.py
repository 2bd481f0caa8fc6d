"""Messages to the letter, by name: `messages.json` holds them as templates of `str.format`."""

import json
from pathlib import Path
from typing import Final

_TEMPLATES: Final[dict[str, str]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)


def message(name: str, *values: object) -> str:
    return _TEMPLATES[name].format(*values)
