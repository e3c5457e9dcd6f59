"""Between a laptop and the Hub: a proxy, a proxy that opens TLS with its own CA."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stage.download.downloader import Downloader
from stage.download.http import Connections, timeout_s, tls_context
from stage.download.retry import RetryPolicy
from stage.errors import IncompleteError, UsageError
from stage.hub.client import Hub
from stage.progress import Reporter
from tests.support.servers.hubs import TestHub
from tests.support.servers.proxy import Proxy
from tests.support.staging import MANIFEST, Laptop


def hub(endpoint: str) -> Hub:
    connections = Connections(read_timeout_s=timeout_s(), at_once=1, trust=tls_context())
    return Hub(endpoint, Downloader(connections, Reporter(quiet=True), RetryPolicy(attempts=1)))


def test_a_hub_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "0.2")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(IncompleteError, match="the server was silent for too long"):
            hub(endpoint).repository("model", "acme/bert", "main")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our own CA (`ca.pem`) and its certificate for 127.0.0.1 (`hub.pem`, `hub.key`)."""
    folder = tmp_path_factory.mktemp("ca")

    def openssl(*arguments: object) -> None:
        subprocess.run(
            ["openssl", *map(str, arguments)], cwd=folder, check=True, capture_output=True
        )

    key = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=Site CA")
    openssl("req", *key[:3], "-keyout", "hub.key", "-out", "hub.csr", "-subj", "/CN=127.0.0.1")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    signing = (
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        "names",
    )
    openssl("x509", "-req", "-in", "hub.csr", "-out", "hub.pem", *signing)
    return folder


@pytest.fixture
def laptop(laptop: Laptop) -> Laptop:
    """Connections are set up once per process, from its environment."""
    laptop.own_process = True
    return laptop


@pytest.fixture
def tls_laptop(authority: Path, tmp_path: Path) -> Iterator[Laptop]:
    """A laptop whose Hub has a TLS certificate that only the site's CA signed."""
    with ExitStack() as stack:
        certificate = (authority / "hub.pem", authority / "hub.key")
        hub = TestHub(tmp_path / "hub", stack, certificate=certificate)
        (tmp_path / "laptop").mkdir()
        laptop = Laptop(tmp_path / "laptop", hub, own_process=True)
        laptop.publish()
        laptop.write(MANIFEST)
        yield laptop


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_a_ca_of_the_site_is_honoured(
    tls_laptop: Laptop, authority: Path, undisturbed_id: str, variable: str
) -> None:
    assert tls_laptop.hub.endpoint.startswith("https://")
    assert tls_laptop.fetched(**{variable: str(authority / "ca.pem")}) == undisturbed_id


def test_a_ca_nobody_vouches_for_is_refused_with_the_remedy(tls_laptop: Laptop) -> None:
    assert "SSL_CERT_FILE" in tls_laptop.refused(5)


def test_a_password_for_the_proxy_is_sent_to_it_and_to_nobody_else(
    laptop: Laptop, undisturbed_id: str
) -> None:
    with Proxy(password="me:s3cret") as proxy:
        assert laptop.fetched(http_proxy=f"http://me:s3cret@{proxy.address}") == undisturbed_id
    assert proxy.seen and not proxy.refused
    assert "s3cret" not in (laptop.bundle / "bag-info.txt").read_text()
    assert not any(request.token for request in laptop.hub.requests())


@pytest.mark.parametrize(
    "address", ["socks5h://me:s3cret@127.0.0.1:9", "socks4://127.0.0.1:9", "http://[::1", "http://"]
)
def test_a_proxy_that_cannot_be_used_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("all_proxy", address)
    monkeypatch.setenv("no_proxy", "")
    connections = Connections(read_timeout_s=5, at_once=1, trust=tls_context())
    for ask in (
        lambda: hub("http://hub.test").repository("model", "acme/bert", "main"),
        lambda: connections.request("GET", "http://hub.test/f", {}),
    ):
        with pytest.raises(UsageError, match="that the environment names") as refused:
            ask()
        assert "unset all_proxy" in refused.value.remedy and "s3cret" not in str(refused.value)
