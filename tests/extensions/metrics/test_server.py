"""The metrics server: loopback by default, tokens and client certificates beyond it, and no request that can hurt a training."""

from __future__ import annotations

import http.client
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from hasten.errors import ConfigError
from hasten.extensions.metrics import server
from hasten.extensions.metrics.server import MetricsServer, access_of
from hasten.extensions.metrics.settings import MetricsSettings
from tests.support import scrape

TEXT = "hasten_step 1\n"


@contextmanager
def serving(settings: MetricsSettings, text: str = TEXT) -> Iterator[int]:
    """Serve a text at any free port; yields the port."""
    made = MetricsServer(0, access_of(settings), lambda: text)
    made.start()
    try:
        assert made.port is not None
        yield made.port
    finally:
        made.close()


def get(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    link.request("GET", path, headers=headers)
    answer = link.getresponse()
    found = answer.status, answer.read().decode()
    link.close()
    return found


def test_metrics_are_served_and_other_paths_are_not() -> None:
    with serving(MetricsSettings()) as port:
        assert get(port) == (200, TEXT)
        assert get(port, "/metrics?x=1") == (200, TEXT)
        assert get(port, "/secret")[0] == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_other_addresses_need_authentication(host: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"metrics\.host=.*everyone in the network.*Set metrics\.token_file",
    ):
        access_of(MetricsSettings(host=host))
    (tmp_path / "token").write_text("abc\n")
    assert (
        access_of(MetricsSettings(host=host, token_file=str(tmp_path / "token"))).token
        == "abc"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert access_of(MetricsSettings(host=host)).token is None


def test_requests_without_the_token_are_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right\n")
    with serving(
        MetricsSettings(host="127.0.0.1", token_file=str(tmp_path / "token"))
    ) as port:
        assert get(port)[0] == 401
        assert get(port, Authorization="Bearer wrong")[0] == 401
        assert get(port, Authorization="right")[0] == 401
        assert get(port, "/secret")[0] == 401, "paths are not revealed"
        assert get(port, Authorization="Bearer right") == (200, TEXT)


@pytest.mark.parametrize(
    ("content", "match"),
    [("", "holds no token"), ("ä", "holds no token"), (None, "cannot be")],
)
def test_a_token_file_without_a_token_is_refused(
    content: str | None, match: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=match):
        access_of(MetricsSettings(token_file=str(tmp_path / "token")))


def make_certificates(folder: Path, host: str = "127.0.0.1") -> None:
    """Write a CA, a certificate of a host and one of a client, and those of another CA's client."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for ca in ("ca", "other"):
        openssl(
            "req",
            "-x509",
            *key,
            "-keyout",
            f"{ca}.key",
            "-out",
            f"{ca}.pem",
            "-days",
            "1",
            "-subj",
            f"/CN={ca}",
        )
    for name, ca in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        openssl(
            "req",
            *key,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
        )
        (folder / "san").write_text(f"subjectAltName=IP:{host}\n")
        sign = (
            "-CA",
            f"{ca}.pem",
            "-CAkey",
            f"{ca}.key",
            "-CAcreateserial",
            "-days",
            "1",
            "-extfile",
            "san",
        )
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *sign)


def test_mutual_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path)

    def at(name: str) -> str:
        return str(tmp_path / name)

    settings = MetricsSettings(
        host="127.0.0.1",
        tls_cert_file=at("server.pem"),
        tls_key_file=at("server.key"),
        tls_client_ca=at("ca.pem"),
    )
    with serving(settings) as port:
        place = "127.0.0.1", port
        (sample,) = scrape.samples(
            *place, None, at("ca.pem"), at("client.pem"), at("client.key")
        )
        assert (sample.name, sample.value) == ("hasten_step", 1.0)
        for cert in (None, "stranger"):
            pair = (
                (None, None) if cert is None else (at(f"{cert}.pem"), at(f"{cert}.key"))
            )
            assert scrape.error(*place, None, at("ca.pem"), *pair)
        assert scrape.error(*place, None, at("other.pem"), None, None), "another server"
        assert scrape.error(*place, None, None, None, None), "without TLS"
    access_of(MetricsSettings(host="0.0.0.0", tls_cert_file=at("server.pem"), tls_key_file=at("server.key"), tls_client_ca=at("ca.pem")))  # fmt: skip
    # TLS alone does not authenticate clients
    with pytest.raises(ConfigError, match=r"Set metrics\.token_file"):
        access_of(
            MetricsSettings(
                host="0.0.0.0",
                tls_cert_file=at("server.pem"),
                tls_key_file=at("server.key"),
            )
        )
    with pytest.raises(
        ConfigError, match=r"needs the server's certificate and its key\. Set both"
    ):
        access_of(MetricsSettings(tls_cert_file=at("server.pem")))
    with pytest.raises(ConfigError, match="PEM files that belong together"):
        access_of(
            MetricsSettings(
                tls_cert_file=at("server.pem"), tls_key_file=at("client.key")
            )
        )
    assert isinstance(access_of(settings).tls, ssl.SSLContext)


def own_address() -> str:
    """The address of this machine in its network; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        address = str(probe.getsockname()[0])
        if not server.is_loopback(address):
            return address
    pytest.skip("this machine has no address but loopback")


def test_an_address_of_the_network_is_served_to_those_who_prove_themselves(
    tmp_path: Path,
) -> None:
    """A token, client certificates, or both, from another machine."""
    host = own_address()
    make_certificates(tmp_path, host)
    (tmp_path / "token").write_text("right\n")

    def at(name: str) -> str:
        return str(tmp_path / name)

    def error_of(port: int, *given: str | None) -> str:
        return scrape.error(host, port, *given)

    certificates = (at("ca.pem"), at("client.pem"), at("client.key"))
    tls = MetricsSettings(
        host="0.0.0.0",
        tls_cert_file=at("server.pem"),
        tls_key_file=at("server.key"),
        tls_client_ca=at("ca.pem"),
    )
    with serving(MetricsSettings(host=host, token_file=at("token"))) as port:
        assert not error_of(port, "right", None, None, None)
        assert "401" in error_of(port, "wrong", None, None, None)
        assert "401" in error_of(port, None, None, None, None)
        with pytest.raises(ConnectionRefusedError):
            get(port)  # loopback: only the given address is served
    with serving(tls) as port:
        assert not error_of(port, None, *certificates)
        assert error_of(port, None, at("ca.pem"), None, None)
        assert error_of(
            port, None, at("ca.pem"), at("stranger.pem"), at("stranger.key")
        )
    with serving(replace(tls, host=host, token_file=at("token"))) as port:
        assert not error_of(port, "right", *certificates)
        assert "401" in error_of(port, None, *certificates)
        assert error_of(port, "right", at("ca.pem"), None, None)


GARBAGE = (
    b"\x00\xff" * 500,
    b"GET\r\n\r\n",
    b"GET /metrics HTTP/9.9\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"",
)


def test_garbage_and_slow_clients_leave_the_server_running(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(server._MetricsRequest, "timeout", 0.5)
    with serving(MetricsSettings()) as port:
        for content in GARBAGE:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
                link.sendall(content)
                link.shutdown(socket.SHUT_WR)
                # the server has closed the connection with bytes of ours unread
                with suppress(ConnectionResetError):
                    link.recv(4096)
            assert get(port) == (200, TEXT)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        assert get(port) == (200, TEXT), "clients that send nothing delay no other"
        more = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        time.sleep(1.5)  # those beyond the limit are refused, the others have timed out
        assert get(port) == (200, TEXT)
        for link in (*silent, *more):
            link.close()
    assert capfd.readouterr() == ("", ""), "nothing is printed"


def test_an_error_while_reading_is_the_scrapers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> str:
        raise RuntimeError("no numbers")

    made = MetricsServer(0, access_of(MetricsSettings()), broken)
    made.start()
    try:
        assert made.port is not None
        with caplog.at_level(logging.WARNING):
            assert get(made.port)[0] == 500
        assert "no numbers" in caplog.text
    finally:
        made.close()


def test_a_port_that_is_taken_is_used_when_it_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_AGAIN_S", 0.05)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        made = MetricsServer(port, access_of(MetricsSettings()), lambda: TEXT)
        with caplog.at_level(logging.WARNING):
            made.start()
        assert made.port is None
        assert "the training is not affected" in caplog.text
        assert "set metrics.port to a free one" in caplog.text
    try:
        for _ in range(100):
            if made._server is not None:
                break
            time.sleep(0.05)
        assert get(port) == (200, TEXT)
    finally:
        made.close()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_a_fork_does_not_hold_the_port() -> None:
    reading, writing = os.pipe()
    forked, told = os.pipe()
    with serving(MetricsSettings()) as port:
        pid = os.fork()
        if pid == 0:  # lives until the pipe is closed
            os.close(writing)
            os.write(told, b"1")
            os.read(reading, 1)
            os._exit(0)
        os.read(forked, 1)  # the handlers of forks have run
        assert get(port) == (200, TEXT)
    try:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
            free.listen()  # fails while another process listens
    finally:
        for one in (writing, reading, forked, told):
            os.close(one)
        os.waitpid(pid, 0)


def test_closing_at_once_and_twice() -> None:
    for _ in range(5):
        made = MetricsServer(0, access_of(MetricsSettings()), lambda: TEXT)
        made.start()
        made.close()
        made.close()
    assert not [
        thread for thread in threading.enumerate() if thread.name == "hasten-metrics"
    ]
