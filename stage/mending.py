"""What to do about damage that a push could not mend: words and commands, to be copied to a shell as they are."""

from __future__ import annotations

import shlex
from pathlib import Path

from stage.push import PushOutcome
from stage.remote import Target


def mending(outcome: PushOutcome, bundle: Path, report: Path, ssh: str) -> list[str]:
    """Lines for a person: for extra files a push that removes them, for damage a patch and its way there.

    Args:
        report: where the other end's findings were written.
        ssh: the command the push connected with.
    """
    problems = {finding["problem"] for finding in outcome.report["findings"]}
    lines: list[str] = []
    if problems - {"extra"}:
        there = "there" if outcome.target.host else "on that disk"
        lines += [
            f"Sent twice and still damaged: the disk or its file system {there} is to be looked at. To carry only what "
            "is damaged:",
            *_patch_commands(outcome, bundle, report, ssh),
        ]
    if "extra" in problems:
        again = ["stage", "push", str(bundle), str(outcome.target), *_ssh_option(ssh), "--delete"]
        lines += [f"Files are there that the bundle does not have. To remove them: {shlex.join(again)}"]
    return lines


def _patch_commands(outcome: PushOutcome, bundle: Path, report: Path, ssh: str) -> list[str]:
    target = outcome.target
    patch = bundle.with_name(f"{bundle.resolve().name}.patch")
    made = shlex.join(["stage", "patch", str(bundle), "--report", str(report), "-o", str(patch)])
    if target.host is None:
        return [made, shlex.join(["stage", "apply", target.folder, str(patch)])]
    carried = Target(target.host, f"{target.folder}.patch")
    way = ["-e", ssh] if ssh != "ssh" else []
    apply = shlex.join(["stage", "apply", target.folder, carried.folder])
    host = target.host.replace("[", "").replace("]", "")
    there = f"{ssh} {shlex.quote(host)} {shlex.quote(apply)}"
    return [
        made,
        shlex.join(["rsync", "-rts", *way, f"{patch}/", f"{carried}/"]),
        there if outcome.verified_with == "stage" else f"and on {host}, which has no `stage` on its PATH now: {apply}",
    ]


def _ssh_option(ssh: str) -> list[str]:
    return ["--ssh", ssh] if ssh != "ssh" else []
