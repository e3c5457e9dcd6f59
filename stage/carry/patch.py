"""The format of a patch, written and read.

A patch is a folder and a BagIt bag (`sha256sum -c` and bagit validate it). It has `patch.json`, the
plan, and, under `data/`, whole files named by their sha256. A content is in the patch once, even if
several files need it. `stage.carry.make_patch` writes patches, and `stage.carry.apply_patch`
applies them.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from stage.bundle.bundle import (
    BAG_INFO,
    BAGIT,
    BAGIT_TEXT,
    MANIFEST,
    PATCH_PLAN,
    TAG_MANIFEST,
    manifest_text,
    parse_manifest,
)
from stage.digests import is_hex, sha256_of_bytes
from stage.errors import DamageError, PolicyError, UsageError, suggest_path
from stage.files import read_file, sync_disk, write_atomically
from stage.lock.fields import Fields, read_document
from stage.paths import printable, problem_with_path

FORMAT = 1
PLAN = PATCH_PLAN
KINDS = ("repair", "update")
_REMEDY = "Give the folder that `stage patch -o` wrote."


@dataclass(frozen=True)
class PatchPlan:
    """What a patch does.

    Attributes:
        kind: `repair` a bundle's damage, or `update` it to another.
        base, target: bundle ids before and after; equal for a repair.
        contents: sha256 of each file that is carried -> its bytes.
        repair: payload paths to repair.
        tags: path -> sha256 of the files beside the payload that are carried.
    """

    kind: str
    base: str
    target: str
    contents: Mapping[str, int]
    repair: tuple[str, ...]
    tags: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of all contents."""
        return sum(self.contents.values())

    @property
    def id(self) -> str:
        """A digest of the plan: no other patch has it."""
        return sha256_of_bytes(self.to_json())

    def to_json(self) -> bytes:
        """`patch.json`."""
        document = {
            "format": FORMAT,
            "kind": self.kind,
            "base": self.base,
            "target": self.target,
            "contents": dict(self.contents),
            "repair": list(self.repair),
            "tags": dict(self.tags),
        }
        return (json.dumps(document, sort_keys=True, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class Patch:
    """A patch on disk."""

    root: Path
    plan: PatchPlan

    def path_of(self, digest: str) -> Path:
        """Where the content of that sha256 lies."""
        return self.root / "data" / digest


def write_patch(root: Path, plan: PatchPlan, bring: Callable[[str, Path], None]) -> None:
    """Writes a patch into a new folder, its tag manifest last.

    Args:
        bring: writes the content of that sha256 to that path.
    """
    data = root / "data"
    data.mkdir(parents=True)
    patch = Patch(root, plan)
    for digest in plan.contents:
        bring(digest, patch.path_of(digest))
    sync_disk(data)
    texts = {
        BAGIT: BAGIT_TEXT,
        BAG_INFO: f"Payload-Oxum: {plan.size}.{len(plan.contents)}\n".encode(),
        MANIFEST: manifest_text({f"data/{digest}": digest for digest in plan.contents}),
        PLAN: plan.to_json(),
    }
    for name, text in texts.items():
        write_atomically(root / name, text)
    write_atomically(
        root / TAG_MANIFEST,
        manifest_text({name: sha256_of_bytes(text) for name, text in texts.items()}),
    )


def open_patch(root: Path) -> Patch:
    """Opens a patch. Checks the plan, not yet the contents.

    Raises:
        UsageError: no patch there.
        DamageError: the plan is not as it was written.
        PolicyError: a path in the plan that may not be in a bundle.
    """
    if not (root / PLAN).exists():
        raise UsageError(f"{root}: no patch: there is no {PLAN}.", suggest_path(root, _REMEDY))
    try:
        data, sealed = read_file(root / PLAN), read_file(root / TAG_MANIFEST)
    except OSError as error:
        raise _damaged(Path(error.filename or root), error.strerror or "cannot be read") from None
    if parse_manifest(sealed).get(PLAN) != sha256_of_bytes(data):
        raise _damaged(root / PLAN, f"not the sha256 that {TAG_MANIFEST} has")
    file = str(root / PLAN)
    document = read_document(data, file, "a patch", (FORMAT,), _REMEDY)
    return Patch(root, _plan(Fields(document.data, f"{file}: not a patch", _REMEDY), file))


def check_contents(patch: Patch, progress: Callable[[int], None]) -> None:
    """Reads every content of a patch.

    Raises:
        DamageError: one is missing or not as it was written.
    """
    for expected, size in patch.plan.contents.items():
        digest, path = sha256(), patch.path_of(expected)
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                raise _damaged(path, f"not a file of {size} bytes")
            with open(path, "rb", buffering=0) as source:
                while data := source.read(2**20):
                    digest.update(data)
                    progress(len(data))
        except OSError as error:
            raise _damaged(path, error.strerror or "cannot be read") from None
        if digest.hexdigest() != expected:
            raise _damaged(path, f"sha256 {digest.hexdigest()}")


def _damaged(path: Path, found: str) -> DamageError:
    return DamageError(
        f"{path}: the patch is damaged here ({found}). The bundle was not touched.",
        "Copy the patch again: rsync -c.",
    )


def _plan(fields: Fields, file: str) -> PatchPlan:
    """The plan that `patch.json` describes.

    Raises:
        UsageError: a field is wrong, or two contradict each other.
        PolicyError: a path that may not be in a bundle.
    """
    fields.take("repair", list)
    repair, tags, contents = (
        fields.texts("repair"),
        fields.inside("tags"),
        fields.inside("contents"),
    )
    for path in [*tags.data, *repair]:
        if problem := problem_with_path(path):
            raise PolicyError(
                f"{file}: {printable(path)} may not be in a bundle: {problem}.",
                "Do not use this patch: ask who made it.",
            )
    for key in contents.data:
        if not is_hex(key, 64):
            contents.fail("should have a sha256 for a name", key)
    plan = PatchPlan(
        kind=fields.choice("kind", KINDS) or fields.missing("kind"),
        base=fields.hex("base"),
        target=fields.hex("target"),
        contents={digest: contents.take(digest, int) for digest in contents.data},
        repair=repair,
        tags={path: tags.hex(path) for path in tags.data},
    )
    if len(set(repair)) != len(repair):
        fields.fail("names a file twice", "repair")
    if any(not path.startswith("data/") for path in repair):
        fields.fail("names a file outside `data/`", "repair")
    if any(path.startswith("data/") for path in tags.data):
        fields.fail("names a file of `data/`", "tags")
    for path, digest in plan.tags.items():
        if digest not in plan.contents:
            tags.fail("has no content", path)
    return plan
