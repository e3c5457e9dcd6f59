"""Commands that repair damage which a push could not repair, ready to be copied to a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from stage.carry.push import PushOutcome
from stage.carry.remote import PushTarget


def suggest_repairs(outcome: PushOutcome, bundle: Path, report: Path, ssh: str) -> list[str]:
    """Lines with commands: a push that removes extra files, a patch that repairs damaged ones.

    Args:
        report: the file with the findings of the remote verification.
        ssh: the command the push connected with.
    """
    problems = {finding["problem"] for finding in outcome.report["findings"]}
    lines: list[str] = []
    if problems - {"extra"}:
        where = "there" if outcome.target.host else "on that disk"
        lines += [
            f"Sent twice and still damaged: check the disk or the file system {where}. "
            "To carry only the damaged files:",
            *_patch_commands(outcome, bundle, report, ssh),
        ]
    if "extra" in problems:
        again = ["stage", "push", str(bundle), str(outcome.target), *_ssh_option(ssh), "--delete"]
        lines += [
            f"Files are there that the bundle does not have. To remove them: {shlex.join(again)}"
        ]
    return lines


def _patch_commands(outcome: PushOutcome, bundle: Path, report: Path, ssh: str) -> list[str]:
    target = outcome.target
    patch = bundle.with_name(f"{bundle.resolve().name}.patch")
    make = shlex.join(["stage", "patch", str(bundle), "--report", str(report), "-o", str(patch)])
    if target.host is None:
        return [make, shlex.join(["stage", "apply", target.folder, str(patch)])]
    carried = PushTarget(target.host, f"{target.folder}.patch")
    shell = ["-e", ssh] if ssh != "ssh" else []
    send = shlex.join(["rsync", "-rts", *shell, f"{patch}/", f"{carried}/"])
    apply = shlex.join(["stage", "apply", target.folder, carried.folder])
    host = target.host.replace("[", "").replace("]", "")
    if outcome.verified_with == "stage":
        return [make, send, f"{ssh} {shlex.quote(host)} {shlex.quote(apply)}"]
    return [make, send, f"and on {host}, which has no `stage` on its PATH now: {apply}"]


def _ssh_option(ssh: str) -> list[str]:
    return ["--ssh", ssh] if ssh != "ssh" else []
