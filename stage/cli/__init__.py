"""The `stage` command: parses, prints, sets the exit code; nothing else.

Each command is in the file that `_COMMANDS` names. It imports what takes time inside itself, so
that `stage verify --help` starts fast on a login node.
"""

from __future__ import annotations

import click

from stage.cli.base import Group
from stage.version import __version__

# The module of each command. It is imported at the command's first use, or for the help.
_COMMANDS = {
    "init": "stage.cli.init",
    "trace": "stage.cli.serve",
    "lock": "stage.cli.fetch",
    "fetch": "stage.cli.fetch",
    "sign": "stage.cli.sign",
    "push": "stage.cli.transfer",
    "verify": "stage.cli.verify",
    "show": "stage.cli.show",
    "serve": "stage.cli.serve",
    "patch": "stage.cli.transfer",
    "apply": "stage.cli.transfer",
    "env": "stage.cli.env",
}
_SECTIONS = {
    "Laptop": ("init", "trace", "lock", "fetch", "sign"),
    "Between": ("push",),
    "Cluster": ("verify", "show", "serve"),
    "Both": ("patch", "apply", "env"),
}


@click.group(
    cls=Group,
    elsewhere=_COMMANDS,
    sections=_SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="stage")
def main() -> None:
    """Carries models, datasets and files over an air gap: one folder, every byte accounted for.

    \b
    laptop:   stage fetch manifests/my.yaml -o bundle
              stage push bundle me@cluster:bundle
    cluster:  stage verify bundle

    Exit codes: 0 sound or done; 1 damage or failure found; 2 wrong usage or a bad manifest;
    3 refused by policy; 4 signature missing or wrong; 5 could not finish, run it again.
    """
