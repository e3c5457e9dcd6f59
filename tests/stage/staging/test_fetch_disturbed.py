"""After any network fault, `stage fetch` ends with the same bundle as an undisturbed fetch."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from stage.digests import Digest
from stage.download.partial_file import partial_path
from tests.support.staging import MANIFEST, MODEL, Laptop, payload

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


def test_an_expired_address_is_asked_for_again_at_the_hub(
    laptop: Laptop, undisturbed_id: str
) -> None:
    laptop.hub.faults.add(side="cdn", path=WEIGHTS, times=1, status=403)
    assert laptop.fetched() == undisturbed_id
    asked = [(r.side, r.status) for r in laptop.hub.requests(WEIGHTS)]
    assert asked == [("hub", 302), ("cdn", 403), ("hub", 302), ("cdn", 200)]


def test_what_came_before_a_cut_is_not_asked_for_again(laptop: Laptop, undisturbed_id: str) -> None:
    laptop.hub.faults.add(side="cdn", path=WEIGHTS, times=1, drop_after=1_000_000)
    laptop.hub.faults.add(side="cdn", path=WEIGHTS, times=1, drop_after=500_000)
    assert laptop.fetched() == undisturbed_id
    ranges = [r.range for r in laptop.hub.requests(WEIGHTS, side="cdn")]
    assert ranges == [None, "bytes=1000000-", "bytes=1500000-"]


def test_a_resume_is_reported_and_only_bytes_from_the_network_are_counted(laptop: Laptop) -> None:
    laptop.fetched(AIRLIFT_STORE="none")
    weights = laptop.bundle / "data/models/tiny-bert/model.safetensors"
    data = weights.read_bytes()
    weights.unlink()
    partial_path(weights, Digest("sha256", sha256(data).hexdigest())).write_bytes(data[:2_000_000])
    done = laptop.fetch(AIRLIFT_STORE="none")
    assert "model.safetensors: resuming at 2 MB of 3 MB" in done.stderr, done.stderr
    assert ", 1 MB fetched" in done.stderr, done.stderr


def test_a_folder_beside_the_manifest_is_named_where_the_hub_has_no_such_model(
    laptop: Laptop,
) -> None:
    (laptop.folder / "src/tiny").mkdir(parents=True)
    laptop.write(MANIFEST.replace(f"model: {MODEL}", "model: src/tiny"))
    assert "write `path: src/tiny`" in laptop.refused(2)


def test_a_server_gets_the_pause_that_it_asks_for_and_the_pause_is_printed(
    laptop: Laptop,
) -> None:
    laptop.hub.faults.add(side="hub", path=INFO, times=1, status=429, headers={"Retry-After": "3"})
    laptop.hub.faults.add(
        side="cdn", path=WEIGHTS, times=1, status=503, headers={"Retry-After": "1"}
    )
    done = laptop.stage("fetch", "tiny.yaml", "-o", "bundle", "--no-offline-check")
    assert done.returncode == 0, done.stderr
    assert "HTTP 429; trying again in 3" in done.stderr
    for place, status, pause in ((INFO, 429, 3), (WEIGHTS, 503, 1)):
        (refusal,) = laptop.hub.requests(place, status=status)
        after = [
            r
            for r in laptop.hub.requests(place, side=refusal.side)
            if r.file == refusal.file and r is not refusal
        ]
        assert min(r.at for r in after if r.at > refusal.at) - refusal.at >= pause


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


def test_a_hub_that_stays_away_ends_it_in_words(laptop: Laptop) -> None:
    laptop.hub.faults.add(side="hub", path=INFO, status=503, headers={"Retry-After": "5000"})
    message = laptop.refused(5)
    assert "503" in message and "5000" in message
