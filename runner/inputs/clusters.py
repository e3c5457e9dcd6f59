"""The connection to a cluster, for `runner.remote`: no part of a bundle is read here."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from runner.from_stage import IncompleteError, StageError, human_size, print_line
from stage.carry.clusters import profiles
from stage.carry.probe import room_script, rooms_of
from stage.carry.ssh import RemoteShell
from stage.environment.spec.profile import Profile


def has_gpus(beside: Path) -> bool | None:
    """Whether the nodes of the clusters in the nearest clusters.yaml have GPUs; None: not known."""
    known = {profile.cuda is not None for _, profile in _readable(profiles(beside))}
    return known.pop() if len(known) == 1 else None


def gpus_of(paths: Iterable[Path]) -> list[tuple[str, float]]:
    """The GPUs of the nodes that profiles describe: name and profile, compute capability."""
    return [
        (f"{profile.gpu or 'GPU'} (by {path})", float(profile.compute_capability))
        for path, profile in _readable(paths)
        if profile.compute_capability is not None
    ]


def _readable(paths: Iterable[Path]) -> Iterator[tuple[Path, Profile]]:
    """The profiles without mistakes; `stage env lock` reports those of the others."""
    for path in paths:
        with suppress(StageError):
            yield path, Profile.load(path)


def check_room(remote: RemoteShell, needed: int) -> None:
    """Says what is free at the cluster's folder, and refuses what cannot fit.

    Args:
        needed: bytes, of bundle and environment.

    Raises:
        IncompleteError: there is less; or no connection.
    """
    said = remote.run(room_script(remote.folder), f"{remote.target}: cannot look")
    room = rooms_of(said)[0]
    left = "not known" if room.left is None else human_size(room.left)
    unknown = "" if room.quota is not None else "; a quota, if there is one, could not be asked"
    print_line(f"left there: {left}{unknown}")
    if room.left is not None and room.left < needed:
        raise IncompleteError(
            f"{remote.target}: bundle and environment need {human_size(needed)} more there, and "
            f"{human_size(room.left)} are left. Nothing was sent.",
            "Free space there, or give another folder in clusters.yaml.",
        )
