"""Credentials out of text that people paste into issues: passwords in addresses, values of secret names, known kinds of keys."""

import re
from typing import Any, Final

HIDDEN: Final = "***"

_NAME: Final = r"(?:key|token|secret|passw(?:or)?d|passphrase|pwd|credential|auth|authorization|cookie|signature|sig)s?"
_SECRET_NAME: Final = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)
_NOT_SECRET: Final = re.compile(r"TOKENIZER|KEYBOARD|AUTHOR\b|PASSES", re.IGNORECASE)
_PATTERNS: Final = (
    # user:password@host, with a scheme or without; to the last @, because passwords may hold one
    (re.compile(r"""(://)[^\s"'<>]*@"""), rf"\1{HIDDEN}@"),
    (re.compile(r"""[^\s"'=:,;(\[{<>/@]+:[^\s"'<>@]+(?:@[^\s"'<>@]+)*@(?=[\w\[.-])"""), f"{HIDDEN}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {HIDDEN}"),
    # name=value, name: value, "name": "value"
    (re.compile(rf"""(?i)([\w.-]*{_NAME}["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s"',;&)}}\]]+)"""), rf"\1{HIDDEN}"),
    # keys that are known by how they begin
    (
        re.compile(
            r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|pk-|rk-|AKIA|ASIA|AIza|npm_|pypi-)[\w-]{12,}"
        ),
        HIDDEN,
    ),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"), HIDDEN),
    (re.compile(r"(?<![\w.-])[0-9a-fA-F]{32,}(?![\w.-])"), HIDDEN),
)


def is_secret_name(name: str) -> bool:
    """Whether what goes by this name is a secret, whatever it looks like."""
    return bool(_SECRET_NAME.search(_NOT_SECRET.sub("", name)))


def masked(text: str) -> str:
    """The text with credentials replaced by ***."""
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return text


def masked_tree(value: Any) -> Any:  # Any: a nested report
    """The report with credentials replaced in every text, and the values of secret names left out."""
    if isinstance(value, dict):
        return {
            name: "(set, not shown)" if isinstance(name, str) and is_secret_name(name) and item else masked_tree(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked_tree(item) for item in value]
    return masked(value) if isinstance(value, str) else value
