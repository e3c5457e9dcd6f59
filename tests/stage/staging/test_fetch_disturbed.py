"""After any network fault, `stage fetch` ends with the same bundle as an undisturbed fetch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.staging import Laptop, payload

pytestmark = pytest.mark.usefixtures("impatient")
INFO, LISTING = r"^/api/(models|datasets)/acme/[^/]+(/revision/.*)?$", "/tree/"
SMALL_FILE, REDIRECT, WEIGHTS = "/resolve-cache/", "/resolve/", r"model\.safetensors$"
PLACES = (
    {"side": "hub", "path": INFO},
    {"side": "hub", "path": LISTING},
    {"side": "hub", "path": REDIRECT},
    {"side": "hub", "path": SMALL_FILE},
    {"side": "cdn", "path": WEIGHTS},
)
ANSWERS: dict[str, dict[str, Any]] = {
    "429": {"status": 429, "headers": {"Retry-After": "1"}},
    "503": {"status": 503, "body": "<html>maintenance</html>"},
    "closed": {"close": True},
    "cut": {"drop_after": 20},
    "reset": {"drop_after": 20, "reset": True},
}
ON_THE_WAY: dict[str, list[dict[str, Any]]] = {
    "cut twice": [{"drop_after": 1_000_000, "times": 2}],
    "reset twice": [{"drop_after": 1_000_000, "reset": True, "times": 2}],
    "stalled": [{"stall_after": 1_000_000, "stall_s": 60, "times": 1}],
    "silent from the start": [{"delay_s": 60, "times": 1}],
    "CDN address expired": [{"status": 403, "times": 2}],
    "CDN address expired in mid-file": [
        {"drop_after": 500_000, "times": 1},
        {"status": 403, "times": 1},
    ],
    "rest refused with 416": [{"drop_after": 500_000, "times": 1}, {"status": 416, "times": 1}],
    "Range ignored": [{"drop_after": 2_000_000, "times": 1}, {"ignore_range": True, "times": 1}],
    "shorter than announced": [{"truncate_to": 1_000_000, "times": 1}],
    "error page with status 200": [
        {"status": 200, "body": "<html>quota exceeded</html>", "times": 1}
    ],
    "byte flipped once": [{"corrupt_at": 2_000_000, "times": 1}],
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_every_kind_of_request_may_fail(laptop: Laptop, undisturbed_id: str, answer: str) -> None:
    for place in PLACES:
        laptop.hub.faults.add(**place, times=1, **ANSWERS[answer])
    assert laptop.fetched() == undisturbed_id
    for place in PLACES:
        paths = [request.path for request in laptop.hub.requests(place["path"], side=place["side"])]
        was_repeated = len(set(paths)) < len(paths)
        has_no_body = place["path"] == REDIRECT and "drop_after" in ANSWERS[answer]
        assert was_repeated or has_no_body, f"no request to {place} failed"


@pytest.mark.parametrize("disturbance", ON_THE_WAY)
def test_the_weights_come_through(laptop: Laptop, undisturbed_id: str, disturbance: str) -> None:
    for rule in ON_THE_WAY[disturbance]:
        laptop.hub.faults.add(side="cdn", path=WEIGHTS, **rule)
    assert laptop.fetched() == undisturbed_id
    assert len(laptop.hub.requests(WEIGHTS, side="cdn")) > 1


def test_a_flipped_byte_is_refused_and_not_recorded(laptop: Laptop, undisturbed_id: str) -> None:
    rule = {"side": "cdn", "path": WEIGHTS, "corrupt_at": 2_000_000}
    laptop.hub.faults.add(**rule)
    message = laptop.refused(1)
    assert "model.safetensors" in message and "sha256" in message
    assert not [path for path in payload(laptop.bundle) if "model.safetensors" in path]
    laptop.hub.faults.clear()
    assert laptop.fetched() == undisturbed_id


def test_a_flipped_byte_in_a_small_file_is_refused_too(laptop: Laptop, undisturbed_id: str) -> None:
    laptop.hub.faults.add(side="hub", path=r"config\.json$", corrupt_at=3)
    message = laptop.refused(1)
    assert "config.json" in message and "git-sha1" in message
    assert "data/models/tiny-bert/config.json" not in payload(laptop.bundle)
    laptop.hub.faults.clear()
    assert laptop.fetched() == undisturbed_id


def test_an_expired_address_is_asked_for_again_at_the_hub(
    laptop: Laptop, undisturbed_id: str
) -> None:
    laptop.hub.faults.add(side="cdn", path=WEIGHTS, times=1, status=403)
    assert laptop.fetched() == undisturbed_id
    asked = [(r.side, r.status) for r in laptop.hub.requests(WEIGHTS)]
    assert asked == [("hub", 302), ("cdn", 403), ("hub", 302), ("cdn", 200)]
