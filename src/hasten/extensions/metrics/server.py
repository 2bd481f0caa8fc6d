"""HTTP server of a rank's metrics: `GET /metrics` in Prometheus's text format, with a bearer token or client certificates."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import socket
import ssl
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, Final

from hasten.errors import ConfigError
from hasten.extensions.metrics.settings import MetricsSettings

log = logging.getLogger(__name__)
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_PATIENCE_S: Final = 5.0
_MOST: Final = 8
"""Number of requests that are answered at the same time; more are refused."""
_AGAIN_S: Final = 5.0
"""Seconds between two attempts to use a port that is taken."""


@dataclass(frozen=True, slots=True)
class MetricsAccess:
    """Conditions under which metrics are served."""

    host: str
    token: str | None = None
    tls: ssl.SSLContext | None = None


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def access_of(settings: MetricsSettings) -> MetricsAccess:
    """Return the conditions for serving, with the token and certificates read.

    Raises: ConfigError for an address beyond this machine without a token or client certificates, and for unreadable files.
    """
    token = (
        None
        if settings.token_file is None
        else read_token(settings.token_file, "metrics.token_file")
    )
    tls = _tls(settings)
    if (
        not is_loopback(settings.host)
        and token is None
        and settings.tls_client_ca is None
    ):
        raise ConfigError(
            f"metrics.host={settings.host!r} serves metrics beyond this machine without authentication; everyone in the network could read "
            "the job's name, loss and progress. Set metrics.token_file (bearer token) or metrics.tls_client_ca (client certificates), or "
            "metrics.host=127.0.0.1."
        )
    return MetricsAccess(settings.host, token, tls)


def read_token(path: str, setting: str) -> str:
    """Return the token in a file, without surrounding white space. Raises: ConfigError if there is none."""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{setting}={path!r} cannot be read ({error}), so requests cannot be authenticated; give a readable text file that holds the token."
        ) from error
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{setting}={path!r} holds no token of printable ASCII characters, so that it protects nothing; write one into the file, for "
            "example with `openssl rand -hex 32`."
        )
    return token


def _tls(settings: MetricsSettings) -> ssl.SSLContext | None:
    cert, key, ca = (
        settings.tls_cert_file,
        settings.tls_key_file,
        settings.tls_client_ca,
    )
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None:
        raise ConfigError(
            f"metrics.tls_cert_file={cert!r} and metrics.tls_key_file={key!r} (metrics.tls_client_ca={ca!r}) are incomplete: TLS needs the server's "
            "certificate and its key. Set both."
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
        if ca is not None:
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificates of the metrics server cannot be loaded ({error}; metrics.tls_cert_file={cert!r}, tls_key_file={key!r}, "
            f"tls_client_ca={ca!r}), so that metrics would be served without TLS; give PEM files that belong together."
        ) from error
    return context


class _HTTPServer(ThreadingHTTPServer):
    """Server whose TLS handshakes and requests run in threads, so that a slow client delays no other."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, address: tuple[str, int], access: MetricsAccess, text: Callable[[], str]
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.access, self.text = access, text
        self._slots = threading.BoundedSemaphore(_MOST)
        super().__init__(address, _MetricsRequest)

    # Any: as in socketserver
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_PATIENCE_S)
        if self.access.tls is not None:
            with self.access.tls.wrap_socket(request, server_side=True) as secure:
                super().finish_request(secure, client_address)
        else:
            super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an invalid request; nothing is printed."""
        log.debug("a request for metrics from %s failed", client_address, exc_info=True)


class _MetricsRequest(BaseHTTPRequestHandler):
    """Handler of one request for metrics."""

    server: _HTTPServer
    timeout = _PATIENCE_S
    server_version = "hasten"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the metrics."""
        token = self.server.access.token
        if token is not None:
            given = self.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(given, f"Bearer {token}".encode()):
                self._reply(
                    HTTPStatus.UNAUTHORIZED,
                    "a bearer token is needed\n",
                    {"WWW-Authenticate": "Bearer"},
                )
                return
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self._reply(HTTPStatus.NOT_FOUND, "metrics are at /metrics\n")
            return
        try:
            text = self.server.text()
        except Exception as error:  # of any kind: a scrape must not affect the training
            log.warning(
                "the metrics could not be read: %s: %s", type(error).__name__, error
            )
            self._reply(
                HTTPStatus.INTERNAL_SERVER_ERROR, "the metrics could not be read\n"
            )
            return
        self._reply(HTTPStatus.OK, text)

    def _reply(
        self, status: HTTPStatus, text: str, headers: dict[str, str] | None = None
    ) -> None:
        body = text.encode()
        self.send_response(status)
        kind = CONTENT_TYPE if status == HTTPStatus.OK else "text/plain; charset=utf-8"
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request at debug level; nothing is printed."""
        log.debug("metrics request: %s", format % args)


class MetricsServer:
    """Thread that serves the metrics of one rank, from `start` to `close`.

    A port that is taken is tried again every few seconds: after a restart, the previous process may still hold it.
    """

    def __init__(
        self, port: int, access: MetricsAccess, text: Callable[[], str]
    ) -> None:
        self._port = port
        self._access = access
        self._text = text
        self._over = threading.Event()
        self._server: _HTTPServer | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._run, name="hasten-metrics", daemon=True
        )

    @property
    def port(self) -> int | None:
        """The port that is served; None while it is taken by another process."""
        server = self._server
        return None if server is None else int(server.server_address[1])

    def start(self) -> None:
        """Start serving; if the port is taken, log a warning and try again in the background."""
        self._server = self._opened(first=True)
        os.register_at_fork(after_in_child=partial(_close_in_fork, weakref.ref(self)))
        self._thread.start()

    def _opened(self, first: bool) -> _HTTPServer | None:
        try:
            made = _HTTPServer(
                (self._access.host, self._port), self._access, self._text
            )
        except (OSError, OverflowError) as error:
            if first:
                log.warning(
                    "metrics are not served at %s:%d (%s), so that nothing can be scraped there; the training is not affected. The port is "
                    "tried again every %.0f s; set metrics.port to a free one, with a free port for every rank of the machine.",
                    self._access.host,
                    self._port,
                    error,
                    _AGAIN_S,
                )
            return None
        log.info(
            "metrics are served at %s:%d", self._access.host, made.server_address[1]
        )
        return made

    def _run(self) -> None:
        while not self._over.is_set():
            if self._server is None:
                if not self._over.wait(_AGAIN_S):
                    self._server = self._opened(first=False)
                continue
            ready = wait_for([self._server.socket, self._wake_receiver])
            if self._wake_receiver not in ready:
                self._server.handle_request()

    def close(self) -> None:
        """Stop serving and free the port; in a fork, only close the inherited sockets."""
        if os.getpid() == self._pid and not self._over.is_set():
            self._over.set()
            self._wake_sender.send(b"!")
            if (
                self._thread.is_alive()
                and threading.current_thread() is not self._thread
            ):
                self._thread.join(2 * _PATIENCE_S)
        for one in (self._wake_receiver, self._wake_sender):
            one.close()
        if self._server is not None:
            self._server.socket.close()


def _close_in_fork(ref: weakref.ref[MetricsServer]) -> None:
    """Close the sockets that a fork of the rank has inherited, which would keep the port after the end of the rank."""
    if (server := ref()) is not None:
        server.close()
