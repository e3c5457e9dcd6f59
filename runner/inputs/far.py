"""The connection to a cluster, for `runner.remote`: nothing of a bundle is imported here."""

from contextlib import suppress
from pathlib import Path

from runner.errors import StageError
from stage.carry.clusters import Cluster as Cluster
from stage.carry.clusters import find_cluster as find_cluster
from stage.carry.clusters import profiles
from stage.carry.clusters import to_option as to_option  # for runner.cli
from stage.carry.probe import Room as Room
from stage.carry.probe import collect as collect
from stage.carry.probe import room_script, rooms_of
from stage.carry.ssh import Answer as Answer
from stage.carry.ssh import PushTarget as PushTarget
from stage.carry.ssh import RemoteShell as RemoteShell
from stage.carry.ssh import connected as connected
from stage.carry.ssh import log_out as log_out
from stage.environment.spec.profile import Profile


def has_gpus(beside: Path) -> bool | None:
    """Whether the nodes of the clusters in the nearest clusters.yaml have GPUs; None: not known."""
    known = set[bool]()
    for path in profiles(beside):
        with suppress(StageError):
            known.add(Profile.load(path).cuda is not None)
    return known.pop() if len(known) == 1 else None


def room_of(remote: RemoteShell) -> Room:
    """The room at the cluster's folder, which need not be there.

    Raises:
        IncompleteError: no connection.
    """
    return rooms_of(remote.run(room_script(remote.folder), f"{remote.target}: cannot look"))[0]
