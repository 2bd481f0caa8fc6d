"""Masking of credentials in displayed and written text, by the name of a value and by the pattern of a text.

`masked` is for texts, `masked_tree` for nested values. Values used by programs or services are never masked, only their copies in files,
pages and terminals.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, Literal

HIDDEN: Final = "***"
NOT_SHOWN: Final = "(set, not shown)"
"""Replacement of the whole value of a secret name."""

Secrecy = Literal["open", "likely", "certain"]
"""Certainty that values of a name are secret: `likely` hides only text, `certain` also numbers."""


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CERTAIN: Final = _word_set(
    "password passwords passwd pwd passphrase passphrases passcode secret secrets credential credentials cred creds bearer "
    "cookie cookies dsn jwt authorization signature apikey apikeys"
)
_LIKELY: Final = _word_set("key keys token tokens auth private pass")
_OWNERS: Final = _word_set(
    "api access secret private auth oauth ssh signing encryption session refresh bearer bot personal deploy service account "
    "client user login admin root license webhook csrf xsrf sas storage db database hub hf huggingface wandb openai anthropic "
    "github gitlab slack aws azure google comet neptune clearml swanlab mlflow"
)
"""Words before `key` or `token` that mark a credential."""
_COUNTS: Final = _word_set("num n max min total avg average mean")
_HARMLESS_PREFIXES: Final = _word_set(
    "per new image images video audio text input output label labels target column sort metric public "
    "primary foreign partition group cache kv query value dict state model module data batch pad padding eos bos unk sep cls mask "
    "masked special added additional start end stop begin first last next prev prompt completion response generated decoder "
    "encoder forced suppress bad good oov mm vocab word vision patch visual register object think by layer attention attn head "
    "split random rng seed weight extra mapping lookup join index best monitor sequence seq train eval tool decode position "
    "context of forward backward single sub chunk sample feature question answer class"
)
_HARMLESS_SUFFIXES: Final = _word_set(
    "dim dims size sizes count counts len length lengths embedding embeddings embed type types id ids index indices padding mask "
    "head heads value values layer layers per limit budget file path dir name names column columns timeout ratio rate dropout "
    "proj projection bias scale norm cache class level accuracy loss frequency bits width points frames order fn func format "
    "suffix pattern shape pos position positions metric merging pooling mixing mixer shift dtype device weight weights used seen "
    "processed s seconds method mode enabled required expiry expires ttl usage parallel parallelism rank states init std mean "
    "range repo rope window chunk group groups grad gradient choice routing drop capacity"
)
"""Words around `key`, `token`, `auth`, `private` and `pass` that mark a harmless name: `max_tokens`, `key_dim`."""
_DESCRIBING_SUFFIXES: Final = _word_set(
    "file path dir name timeout s seconds expiry expires ttl length size bits type limit"
)
"""Words after `api_key` and the like that describe the credential without being it."""
_DIGESTS: Final = _word_set(
    "commit revision rev sha md hash digest checksum fingerprint uuid crc etag xxh blake"
)
"""Words in the names of values that are long hexadecimal numbers without being secret."""

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_STEMS: Final = r"(?:key|token|secret|passw|passphrase|passcode|pwd|pass|cred|auth|bearer|cookie|private|dsn|jwt|sig)"
_ASSIGNED: Final = re.compile(  # name=value, name: value, "name": "value", --name value
    rf"""(?i)(?<![\w.-])([\w.-]{{0,200}}?{_STEMS}[\w.-]{{0,200}})(["']?\s*[=:]\s*|(?<=[\w])[ \t]+(?=[^\s-]))("[^"]*"|'[^']*'|[^\s"',;&)}}\]]+)"""
)
_PREFIXED: Final = (
    r"hf_[A-Za-z0-9]{12,}|gh[pousr]_\w{12,}|github_pat_\w{12,}|glpat-[\w-]{12,}|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}",
    r"(?:sk|pk|rk)[-_](?=[\w-]{0,200}[0-9A-Z])[\w-]{12,}|gsk_\w{12,}|r8_\w{12,}|whsec_\w{12,}|dop_v1_\w{12,}|dapi[0-9a-f]{12,}",
    r"(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{12,}|ya29\.[\w-]{12,}|SG\.[\w-]{12,}\.[\w-]{12,}|npm_\w{12,}|pypi-[\w-]{12,}",
    r"\d{8,10}:[\w-]{35}(?![\w-])|AGE-SECRET-KEY-\w+",
)
_ADDRESS: Final = re.compile(r"""(://)([^\s"'<>]{0,1000})@""")
_HEX: Final = re.compile(r"(?<![\w.-])[0-9a-fA-F]{32,}(?![\w.-])")


def _mask_address(address_match: re.Match[str]) -> str:
    """Mask an address up to the last @, because passwords may contain one; an @ in a path without a user is not masked."""
    host = address_match[2].partition("/")[0]
    plain = "/" in address_match[2] and "@" not in host and ":" not in host
    return address_match[0] if plain else f"{address_match[1]}{HIDDEN}@"


def _mask_assignments(text: str) -> str:
    """Mask the values of secret names in a text; a space counts as an assignment only in `--name value`."""
    masked_parts = []
    position = 0
    while assignment := _ASSIGNED.search(text, position):
        value_name, between, value = assignment.groups()
        if between.strip() or value_name.startswith("--"):
            secrecy = secrecy_of(value_name)
        else:
            secrecy = "open"
        hide = secrecy == "certain" or (secrecy == "likely" and not _is_number(value))
        # an expression, which holds no secret
        shell = value.lstrip("\"'").startswith(("${", "$("))
        shown_group = hidden_group = 3 if shell else 1
        if hide and not shell:
            shown_group = 2
            hidden_group = 3
        masked_parts.append(text[position : assignment.end(shown_group)])
        masked_parts.append(HIDDEN * (hide and not shell))
        position = assignment.end(hidden_group)
    return "".join(masked_parts) + text[position:]


def _is_number(text: str) -> bool:
    return bool(
        re.fullmatch(
            r"""["']?(?:[+-]?[\d.]+(?:e[+-]?\d+)?|true|false|none|null)["']?""",
            text,
            re.IGNORECASE,
        )
    )


_Replacement = str | Callable[[re.Match[str]], str]
_BEFORE_NAMES: Final[tuple[tuple[re.Pattern[str], _Replacement], ...]] = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|$)"
        ),
        HIDDEN,
    ),
    # user:password@host, with a scheme or without
    (_ADDRESS, _mask_address),
    (
        re.compile(
            r"""(?<![^\s"'=:,;(\[{<>/@])[^\s"'=:,;(\[{<>/@]{1,200}:(?!//)[^\s"'<>]{1,500}@(?=[\w\[.-])(?!\d+\b(?![.:]))"""
        ),
        f"{HIDDEN}@",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {HIDDEN}"),
)
_AFTER_NAMES: Final[tuple[tuple[re.Pattern[str], _Replacement], ...]] = (
    (re.compile(rf"\b(?:{'|'.join(_PREFIXED)})"), HIDDEN),
    (re.compile(r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?"), HIDDEN),
)


def secrecy_of(value_name: str) -> Secrecy:
    """Return the secrecy of a name, regardless of its value; `a.b` is secret if `a` or `b` is."""
    part_secrecies: set[Secrecy] = {
        _of_words([name_word.lower() for name_word in _WORD.findall(name_part)])
        for name_part in re.split(r"[./]", value_name)
    }
    if "certain" in part_secrecies:
        return "certain"
    if "likely" in part_secrecies:
        return "likely"
    return "open"


def _of_words(words: list[str]) -> Secrecy:
    secrecy: Secrecy = "open"
    for index, name_word in enumerate(words):
        previous_word = words[index - 1] if index else ""
        next_word = words[index + 1] if index + 1 < len(words) else ""
        stem = next(
            (s for s in ("tokens", "token", "keys", "key") if name_word.endswith(s)), ""
        )
        glued = name_word.removesuffix(stem) if stem else ""
        certain = name_word in _CERTAIN or name_word.endswith(
            ("password", "passwd", "passphrase")
        )
        if (
            certain or (stem and (glued or previous_word) in _OWNERS)
        ) and next_word not in _DESCRIBING_SUFFIXES:
            return "certain"
        # `skip_keys`: names or counts
        several = name_word in ("keys", "tokens") and len(words) > 1
        if (
            name_word in _LIKELY
            and not several
            and previous_word not in _HARMLESS_PREFIXES
            and next_word not in _HARMLESS_SUFFIXES
        ):
            secrecy = "likely" if _COUNTS.isdisjoint(words) else secrecy
    return secrecy


def masked(text: str, *, digests: bool = False) -> str:
    """Return the text with credentials replaced by ***; with `digests`, long hexadecimal numbers are not masked."""
    for pattern, instead in _BEFORE_NAMES:
        text = pattern.sub(instead, text)
    text = _mask_assignments(text)
    for pattern, instead in _AFTER_NAMES:
        text = pattern.sub(instead, text)
    return text if digests else _HEX.sub(HIDDEN, text)


def masked_value(value_name: str, value: Any) -> Any:  # Any: a nested value
    """Return the value of this name with its credentials masked."""
    return _masked_nested(value_name, value, "open")


def masked_tree(value: Any) -> Any:  # Any: a nested report
    """Return mappings, lists and dataclasses with credentials masked in every text, and the values of secret names omitted."""
    return _masked_nested("", value, "open")


def _masked_nested(value_name: str, value: Any, above: Secrecy) -> Any:
    name_secrecy = secrecy_of(value_name)
    if "certain" in (name_secrecy, above):
        secrecy: Secrecy = "certain"
    elif "likely" in (name_secrecy, above):
        secrecy = "likely"
    else:
        secrecy = "open"
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {
            masked(key) if isinstance(key, str) else key: _masked_nested(
                str(key), item, secrecy
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked_nested("", item, secrecy) for item in value]
    if (
        value is None
        or isinstance(value, bool)
        or (isinstance(value, str | bytes) and not value)
    ):
        return value
    if secrecy == "certain" or (
        secrecy == "likely" and not isinstance(value, int | float)
    ):
        return NOT_SHOWN
    if isinstance(value, str):
        return masked(
            value,
            digests=not _DIGESTS.isdisjoint(
                name_word.lower() for name_word in _WORD.findall(value_name)
            ),
        )
    return value
