"""Mirrors that lead to the Hub itself, which a laptop behind a firewall does not reach."""

from __future__ import annotations

import json
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.remedies.obeyed import in_it, obeys
from tests.support.servers.hubs import TestHub
from tests.support.staging import MANIFEST, MODEL, Laptop, bundle_id

BEYOND = "https://hub.invalid"  # RFC 2606: no such host


def test_a_next_page_at_the_hubs_own_address_is_asked_of_the_mirror(
    tmp_path: Path, undisturbed_id: str
) -> None:
    with ExitStack() as stack:
        hub = TestHub(tmp_path / "hub", stack, page_size=2)
        laptop = Laptop(tmp_path, hub)
        laptop.publish()
        laptop.write(MANIFEST)
        query = "recursive=true&expand=false"
        with urllib.request.urlopen(f"{hub.endpoint}/api/models/{MODEL}/tree/main?{query}") as page:
            rows = json.load(page)
        link = f"<{BEYOND}/api/models/{MODEL}/tree/main?{query}&cursor=2>"
        hub.faults.add(
            path=f"^/api/models/{MODEL}/tree/",
            times=1,
            status=200,
            headers={"Link": f'{link}; rel="next"', "Content-Type": "application/json"},
            body=json.dumps(rows),
        )
        done = laptop.fetch()
        assert done.returncode == 0 and "trying again" not in done.stderr, done.stderr
        assert bundle_id(laptop.bundle) == undisturbed_id


@obeys("stage/download/http.py", "A mirror must serve all files itself.")
@pytest.mark.parametrize("path", [f"^/api/models/{MODEL}/tree/", "/resolve/.*config.json"])
def test_a_redirect_to_a_hub_out_of_reach_is_refused_soon_with_both_hosts(
    tmp_path: Path, laptop: Laptop, path: str
) -> None:
    laptop.hub.faults.add(path=path, status=308, headers={"Location": f"{BEYOND}/x"})
    said = laptop.refused(5)
    assert "127.0.0.1 redirects to hub.invalid: " in said and "after 3 attempts" in said
    option = in_it(said, "(?<=another )--endpoint")
    with ExitStack() as stack:
        laptop.hub = TestHub(tmp_path / "other", stack)
        laptop.publish()
        laptop.fetched("bundle", option, laptop.hub.endpoint)
