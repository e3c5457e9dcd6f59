"""The Hub of the tests serves ranges, and breaks where a test of a resumed fetch asks for it."""

from __future__ import annotations

import pytest
import urllib3

from tests.support.servers.hubs import TestHub

WEIGHTS = bytes(range(256)) * 2000
FILES = {"model.safetensors": WEIGHTS}


def get(url: str, method: str = "GET", **headers: str) -> urllib3.BaseHTTPResponse:
    return urllib3.request(method, url, headers=headers, redirect=False, retries=False, timeout=30)


def cdn_url(hub: TestHub) -> str:
    return get(f"{hub.endpoint}/acme/tiny/resolve/main/model.safetensors", "HEAD").headers[
        "location"
    ]


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [("bytes=0-9", 0, 9), ("bytes=511990-", 511990, 511999), ("bytes=-3", 511997, 511999)],
)
def test_ranges_are_served(hub: TestHub, asked: str, first: int, last: int) -> None:
    hub.commit("models", "acme/tiny", FILES)
    answer = get(cdn_url(hub), Range=asked)
    assert (answer.status, answer.data) == (206, WEIGHTS[first : last + 1])
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(WEIGHTS)}"
    assert get(cdn_url(hub), Range="bytes=512000-").status == 416


def received(url: str) -> bytes:
    """The bytes that arrive before the connection breaks."""
    data = b""
    with pytest.raises(urllib3.exceptions.HTTPError):
        answer = urllib3.request("GET", url, preload_content=False, retries=False, timeout=0.5)
        while chunk := answer.read(1000):
            data += chunk
    return data


@pytest.mark.parametrize(
    "fault",
    [{"drop_after": 100_000}, {"stall_after": 100_000, "stall_s": 30}],
    ids=["cut", "stalled"],
)
def test_a_body_breaks_at_the_byte_asked_for(hub: TestHub, fault: dict[str, int]) -> None:
    hub.commit("models", "acme/tiny", FILES)
    hub.faults.add(side="cdn", path=r"model\.safetensors$", times=1, **fault)
    assert received(cdn_url(hub)) == WEIGHTS[:100_000]
    assert get(cdn_url(hub)).data == WEIGHTS
