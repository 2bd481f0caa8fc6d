"""Reading of other ranks' metrics over HTTP: targets by name or from a file, and one request to each at the same time."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hasten.errors import ConfigError
from hasten.optional import need

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

_PATIENCE_S: Final = 3.0
_MOST_BYTES: Final = 1 << 22
_AT_ONCE: Final = 32
_TARGET: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]@]+):(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """Address of one rank's metrics."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Scrape:
    """Answer of one target."""

    target: ScrapeTarget
    at_s: float
    samples: Sequence[Sample] = ()
    error: str = ""
    """Reason why there are no samples; empty if there are."""


@dataclass(frozen=True, slots=True)
class ScrapeCredentials:
    """Proof of identity towards metrics servers, and TLS settings."""

    token: str | None = None
    tls: ssl.SSLContext | None = field(default=None)


def targets_of(text: str) -> list[ScrapeTarget]:
    """Return the targets of `host:port,host:first-last,…`, or of a file in Prometheus's JSON for service discovery.

    Raises: ConfigError for anything else.
    """
    path = Path(text)
    names = _in_file(path) if text.endswith(".json") or path.is_file() else text.split(",")
    found = [target for name in names if name.strip() for target in _targets(name.strip())]
    if not found:
        raise ConfigError(f"--from={text!r} names no target, so there is nothing to show; give host:port,host:port.")
    return list(dict.fromkeys(found))


def _targets(name: str) -> list[ScrapeTarget]:
    match = _TARGET.fullmatch(name)
    first = int(match["first"]) if match else 0
    last = int(match["last"] or first) if match else 0
    if match is None or not 1 <= first <= last <= 65535:
        raise ConfigError(
            f"{name!r} is not the address of a metrics server, so it cannot be read; write host:port, or host:9400-9407 for the ranks of a machine."
        )
    return [ScrapeTarget(match["host"].strip("[]"), port) for port in range(first, last + 1)]


def _in_file(path: Path) -> list[str]:
    try:
        groups = json.loads(path.read_text(encoding="utf-8"))
        names = [target for group in groups for target in group["targets"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is not a readable list of targets ({type(error).__name__}: {error}), so it is unclear what to read; write Prometheus's format: "
            '[{"targets": ["host:9400"]}].'
        ) from error
    return [str(name) for name in names]


def credentials(token: str | None, ca: str | None, cert: str | None, key: str | None) -> ScrapeCredentials:
    """Return the credentials; with a CA or a certificate, requests use TLS. Raises: ConfigError for unreadable files."""
    if ca is None and cert is None:
        return ScrapeCredentials(token)
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificates cannot be loaded ({error}; --ca={ca}, --cert={cert}, --key={key}), so no server could be verified; give PEM files."
        ) from error
    return ScrapeCredentials(token, context)


def scrape_all(targets: Sequence[ScrapeTarget], proof: ScrapeCredentials) -> list[Scrape]:
    """Return the answers of all targets, in order; one that does not answer has an error."""
    with ThreadPoolExecutor(min(len(targets), _AT_ONCE)) as pool:
        return list(pool.map(lambda target: scrape(target, proof), targets))


def scrape(target: ScrapeTarget, proof: ScrapeCredentials) -> Scrape:
    """Return the answer of one target."""
    at = time.monotonic()
    try:
        status, body = _get(target, proof)
        if status != http.HTTPStatus.OK:
            hint = "; give --token_file" if status == http.HTTPStatus.UNAUTHORIZED else ""
            return Scrape(target, at, error=f"HTTP {status}{hint}")
        return Scrape(target, at, _parse(body.decode()))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Scrape(target, at, error=f"{type(error).__name__}: {error}")


def _parse(text: str) -> list[Sample]:
    """Return the samples of a text in Prometheus's format. Raises: ValueError for another text."""
    parser = need("prometheus_client.parser", why="hasten top --from")
    samples: list[Sample] = []
    for family in parser.text_string_to_metric_families(text):
        samples += family.samples
    return samples


def _get(target: ScrapeTarget, proof: ScrapeCredentials) -> tuple[int, bytes]:
    if proof.tls is None:
        link = http.client.HTTPConnection(target.host, target.port, timeout=_PATIENCE_S)
    else:
        link = http.client.HTTPSConnection(target.host, target.port, timeout=_PATIENCE_S, context=proof.tls)
    try:
        link.request(
            "GET", "/metrics", headers={} if proof.token is None else {"Authorization": f"Bearer {proof.token}"}
        )
        answer = link.getresponse()
        return answer.status, answer.read(_MOST_BYTES)
    finally:
        link.close()
