"""`stage env`: environments that arrive whole. Parses and prints, as `stage.cli` does.

Each command imports what takes time inside itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stage.cli.base import (
    Group,
    bundle_argument,
    quiet_option,
    say,
    silent,
)
from stage.errors import UsageError
from stage.installation import TO_FETCH, check_libraries
from stage.progress import Reporter

_SECTIONS = {"Laptop": ("lock",), "Cluster": ("probe", "check", "create")}


@click.group(cls=Group, sections=_SECTIONS)
def env() -> None:
    """Environments: lock for a cluster, create offline, check a cluster."""


@env.command()
@click.argument("environment", metavar="ENVIRONMENT.yml", type=click.Path(path_type=Path))
@click.option(
    "--profile",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What the cluster offers.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The lock. Default: conda-lock.yml (x.yml: x.conda-lock.yml) beside ENVIRONMENT.yml.",
)
@click.option(
    "--update",
    "updates",
    multiple=True,
    metavar="NAME",
    help="Let this locked package move. May be repeated.",
)
@click.option(
    "--conda",
    metavar="EXE",
    help="Solve with this conda, mamba or micromamba. Default: yours, else py-rattler.",
)
@quiet_option
@click.option(
    "-v", "--verbose", is_flag=True, help="Also every Python package that conda provides."
)
def lock(
    environment: Path,
    profile: Path,
    output: Path | None,
    updates: tuple[str, ...],
    conda: str | None,
    quiet: bool,
    verbose: bool,
) -> None:
    """Resolve ENVIRONMENT.yml for a cluster to exact packages.

    None is downloaded. A lock that still answers is left as it is. Packages that would not run on
    the cluster are refused.

    \b
    Example:
      stage env lock envs/bert-large.yml --profile envs/profiles/v100.yml
    """
    check_libraries("stage env lock", *TO_FETCH, "conda-lock", "py-rattler", "uv", "packaging")
    from stage.environment.solve.lock import lock_environment

    with Reporter(quiet=quiet, verbose=verbose) as reporter:
        lock_environment(
            environment, profile, reporter=reporter, output=output, updates=updates, conda=conda
        )


@env.command()
@click.option(
    "--script",
    is_flag=True,
    help="Print the script itself, to run where airlift is not: sh env-probe.sh.",
)
@click.option(
    "--to",
    metavar="CLUSTER",
    help="Ask that cluster, over ssh: a name in clusters.yaml, me@host or me@host:FOLDER.",
)
@click.option("--logout", is_flag=True, help="End the login to it that airlift keeps open.")
def probe(script: bool, to: str | None, logout: bool) -> None:
    """Print the profile of this node, which environments must fit.

    Save it in a file. On a login node without a GPU it prints the srun command for a node that has
    one. It changes nothing.

    With --to it asks a cluster from here: shell, Slurm, folders with their room, and by a small job
    the GPU of a node. It writes envs/profiles/NAME.yml and an entry in clusters.yaml; lines of
    yours stay.

    \b
    Examples:
      stage env probe > cluster.yml
      stage env probe --script > env-probe.sh    # for a cluster without airlift
      stage env probe --to me@cluster:/scratch/me/airlift
      stage env probe --to cluster --logout
    """
    from stage.environment.check.node import PROBE, run_script

    if logout and to is None:
        raise UsageError("--logout: of which cluster?", "stage env probe --to CLUSTER --logout")
    if logout and to is not None:
        from stage.carry.clusters import find_cluster
        from stage.carry.ssh import log_out

        cluster = find_cluster(to, Path.cwd(), needs_folder=False)
        say(f"{to}: {'logged out' if log_out(cluster.target) else 'no login of airlift is open'}")
    elif to is not None:
        from stage.carry.probe import probe as probe_cluster

        probe_cluster(to, say)
    elif script:
        click.echo(PROBE.read_text(encoding="utf-8"), nl=False)
    else:
        sys.exit(run_script(PROBE))


@env.command()
@bundle_argument
@click.argument("asset", required=False)
@click.option(
    "--prefix",
    metavar="P",
    type=click.Path(path_type=Path),
    help="Where it shall be: space, files, quota.",
)
def check(bundle: Path, asset: str | None, prefix: Path | None) -> None:
    """Check whether this node can run an environment of BUNDLE.

    It checks glibc, driver, GPU, space, files, quota, tmp and MPI. Without ASSET, it checks every
    environment of BUNDLE. Run it on a node like those of the job. It unpacks nothing. Exit code 1
    where something would not work; a remedy follows each such line.

    \b
    Example:
      srun stage env check bundle train-env --prefix ~/envs/train
    """
    from stage.environment.check.node import check_environments

    sys.exit(0 if check_environments(bundle, asset, prefix) else 1)


@env.command()
@bundle_argument
@click.argument("asset")
@click.argument("prefix", type=click.Path(path_type=Path))
@quiet_option
def create(bundle: Path, asset: str, prefix: Path, quiet: bool) -> None:
    """Create the environment ASSET of BUNDLE at PREFIX, offline.

    It is there whole, or not at all. Where airlift is not installed, use the bundle's script.

    \b
    Examples:
      stage env create bundle train-env ~/envs/train
      sh bundle/data/envs/train-env/bootstrap.sh ~/envs/train
    """
    from stage.environment.check.node import create as create_environment

    with silent(if_=quiet):
        create_environment(bundle, asset, prefix)
