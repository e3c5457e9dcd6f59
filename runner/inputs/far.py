"""The connection to a cluster, for `runner.remote`: nothing of a bundle is imported here."""

from stage.carry.clusters import Cluster as Cluster
from stage.carry.clusters import find_cluster as find_cluster
from stage.carry.ssh import PushTarget as PushTarget
from stage.carry.ssh import RemoteShell as RemoteShell
from stage.carry.ssh import connected as connected
from stage.carry.ssh import log_out as log_out
