"""Client of a metrics server, with a token and certificates."""

from __future__ import annotations

import http.client
import ssl
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def samples(
    host: str,
    port: int,
    token: str | None,
    ca: str | None,
    cert: str | None,
    key: str | None,
) -> list[Any]:
    """Return the samples that a server answers; with a CA or a certificate, the request uses TLS."""
    link = http.client.HTTPConnection(host, port, timeout=3)
    if ca is not None or cert is not None:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
        link = http.client.HTTPSConnection(host, port, timeout=3, context=context)
    try:
        link.request(
            "GET",
            "/metrics",
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
        )
        answer = link.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise ConnectionRefusedError(f"HTTP {answer.status}")
        return [
            sample
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
        ]
    finally:
        link.close()


def error(*where: Any) -> str:
    """Return the error of a request; empty if it is answered."""
    try:
        samples(*where)
    except (OSError, http.client.HTTPException, ValueError) as failure:
        return f"{type(failure).__name__}: {failure}"
    return ""
