"""The pages in docs/: their links, and what is generated in them."""

from __future__ import annotations

from scripts.lib.docs import links


def test_every_link_and_anchor_of_the_pages_leads_somewhere() -> None:
    assert list(links.broken()) == []


def test_anchors_are_those_of_a_code_host() -> None:
    assert links.slug("`stage fetch MANIFEST -o BUNDLE`") == "stage-fetch-manifest--o-bundle"
    assert links.slug("Code of a model: `allow_code`") == "code-of-a-model-allow_code"
