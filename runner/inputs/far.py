"""The connection to a cluster, for `runner.remote`: nothing of a bundle is imported here."""

from stage.carry.clusters import Cluster as Cluster
from stage.carry.clusters import find_cluster as find_cluster
from stage.carry.clusters import to_option as to_option  # for runner.cli
from stage.carry.probe import Room as Room
from stage.carry.probe import collect as collect
from stage.carry.probe import room_script, rooms_of
from stage.carry.ssh import Answer as Answer
from stage.carry.ssh import PushTarget as PushTarget
from stage.carry.ssh import RemoteShell as RemoteShell
from stage.carry.ssh import connected as connected
from stage.carry.ssh import log_out as log_out


def room_of(remote: RemoteShell) -> Room:
    """The room at the cluster's folder, which need not be there.

    Raises:
        IncompleteError: no connection.
    """
    return rooms_of(remote.run(room_script(remote.folder), f"{remote.target}: cannot look"))[0]
