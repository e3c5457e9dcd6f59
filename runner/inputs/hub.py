"""A bundle as the Hub of the user's own scripts, and the names that it answers to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stage.bundle.bundle import Bundle
from stage.serve import children
from stage.serve.catalogue import Catalogue, ServedRepository

HUB_IN_CHILDREN = Path(children.__file__)
"""A file that each Python of a script loads, so that its children ask the same Hub."""


@dataclass(frozen=True)
class Hub:
    """A bundle as a Hub for the scripts of this node.

    Attributes:
        repositories: kind (`models`, `datasets` or `spaces`) and each name that clients may use
            (`org/name`, an old name, or the name without an owner) -> the repository.
        address: the URL of the server, which listens already.
        serve: answers requests until the process ends.
    """

    bundle_id: str
    repositories: Mapping[tuple[str, str], ServedRepository]
    address: str
    serve: Callable[[], None]


def open_hub(bundle_path: Path, say: Callable[[str], None]) -> Hub:
    """Opens a bundle as a Hub on loopback.

    Args:
        say: prints what clients miss in the bundle.

    Raises:
        UsageError: not a complete bundle.
        DamageError: the bundle's lock is damaged.
    """
    from stage.serve.server import BundleServer

    bundle = Bundle.open(bundle_path.resolve())
    catalogue = Catalogue.of(bundle)
    server = BundleServer(catalogue, "127.0.0.1", 0, say)
    return Hub(bundle.id, catalogue.names, server.address, server.serve_forever)


def catalogue_of(bundle: Path) -> Catalogue:
    """What a bundle serves: `find(kind, name)`, and `own_names`."""
    return Catalogue.of(Bundle.open(bundle))
