"""The format of a patch: its plan and its volumes, written and read.

A volume is a folder and a BagIt bag (`sha256sum -c` and bagit validate it). It has `patch.json`
and, under `data/`, pieces named by their sha256: whole small files, or 16 MiB blocks of large ones.
A piece is in the patch once, even if several files need it. Every volume repeats the whole plan, so
any of them names the others. `stage.transfer.make_patch` writes patches, and
`stage.transfer.apply_patch` applies them.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
from stage.errors import DamageError, PolicyError, UsageError, suggest_path
from stage.util.digests import is_hex, sha256_of_bytes
from stage.util.fields import Fields, read_document
from stage.util.files import read_file, sync_folder, write_atomically
from stage.util.paths import printable, problem_with_path

FORMAT = 1
PLAN = PATCH_PLAN
KINDS = ("repair", "update")
PER_PIECE = 160  # bytes a piece adds to a volume's manifest
PER_VOLUME = 4096  # bytes of a volume's other files
_REMEDY = "Give the folder that `stage patch -o` wrote."


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` of a content, carried under their sha256."""

    start: int
    end: int
    sha256: str


@dataclass(frozen=True)
class Content:
    """The carried bytes of a file: its size, and pieces sorted by start, without overlap."""

    size: int
    pieces: tuple[Piece, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the pieces are all of it."""
        return sum(piece.end - piece.start for piece in self.pieces) == self.size


@dataclass(frozen=True)
class PatchPlan:
    """What a patch does.

    Attributes:
        kind: `repair` a bundle's damage, or `update` it to another.
        base, target: bundle ids before and after; equal for a repair.
        contents: sha256 of a file -> what is carried of it.
        repair: payload paths to repair.
        tags: path -> sha256 of the files beside the payload that are carried.
        volumes: piece sha256 -> number of the volume it is in, from 1.
        count: how many volumes there are.
    """

    kind: str
    base: str
    target: str
    contents: Mapping[str, Content]
    repair: tuple[str, ...]
    tags: Mapping[str, str]
    volumes: Mapping[str, int]
    count: int

    @property
    def pieces(self) -> dict[str, int]:
        """Piece sha256 -> its size in bytes."""
        return {
            p.sha256: p.end - p.start for content in self.contents.values() for p in content.pieces
        }

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(self.pieces.values())

    @property
    def id(self) -> str:
        """The same in all volumes of one patch, and in no other."""
        return sha256_of_bytes(self.to_json(0))

    def to_json(self, volume: int) -> bytes:
        """`patch.json` of one volume."""
        document = {
            "format": FORMAT,
            "kind": self.kind,
            "base": self.base,
            "target": self.target,
            "volume": volume,
            "volumes": self.count,
            "contents": {
                digest: {"size": c.size, "pieces": [[p.start, p.end, p.sha256] for p in c.pieces]}
                for digest, c in self.contents.items()
            },
            "repair": list(self.repair),
            "tags": dict(self.tags),
            "pieces": dict(self.volumes),
        }
        return (json.dumps(document, sort_keys=True, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class Volume:
    """One folder of a patch."""

    root: Path
    number: int
    plan: PatchPlan

    @property
    def pieces(self) -> list[str]:
        """sha256 of the pieces that are in it."""
        return [digest for digest, number in self.plan.volumes.items() if number == self.number]

    def path_of(self, piece: str) -> Path:
        """Where a piece lies."""
        return self.root / "data" / piece


def in_volumes(plan: PatchPlan, volume_size: int | None) -> PatchPlan:
    """The plan with its pieces dealt out: in order, each volume no larger than `volume_size` bytes.

    Raises:
        UsageError: the size is too small for a piece and the plan beside it.
    """
    pieces = plan.pieces
    if volume_size is None:
        return replace(plan, volumes=dict.fromkeys(pieces, 1), count=1)
    draft = replace(plan, volumes=dict.fromkeys(pieces, 99999), count=99999)
    room = volume_size - len(draft.to_json(99999)) - PER_VOLUME
    largest = max(pieces.values(), default=0) + PER_PIECE
    if largest > room:
        raise UsageError(
            f"--volume-size: {volume_size} bytes are too few: the largest piece and the plan take "
            f"{volume_size - room + largest}.",
            f"Give at least --volume-size {-(-(volume_size - room + largest) // 10**6)}MB.",
        )
    volumes: dict[str, int] = {}
    number, free = 1, room
    for piece, size in pieces.items():
        if size + PER_PIECE > free:
            number, free = number + 1, room
        free -= size + PER_PIECE
        volumes[piece] = number
    return replace(plan, volumes=volumes, count=number)


def write_volume(
    root: Path, plan: PatchPlan, number: int, bring: Callable[[str, Path], None]
) -> None:
    """Writes one volume into an empty folder, its tag manifest last.

    Args:
        bring: writes the piece of that sha256 to that path.
    """
    data = root / "data"
    data.mkdir(parents=True)
    volume = Volume(root, number, plan)
    sizes = plan.pieces
    for piece in volume.pieces:
        bring(piece, volume.path_of(piece))
    sync_folder(data)
    oxum = f"{sum(sizes[piece] for piece in volume.pieces)}.{len(volume.pieces)}"
    texts = {
        BAGIT: BAGIT_TEXT,
        BAG_INFO: f"Bag-Count: {number} of {plan.count}\nPayload-Oxum: {oxum}\n".encode(),
        MANIFEST: manifest_text({f"data/{piece}": piece for piece in volume.pieces}),
        PLAN: plan.to_json(number),
    }
    for name, text in texts.items():
        write_atomically(root / name, text)
    write_atomically(
        root / TAG_MANIFEST,
        manifest_text({name: sha256_of_bytes(text) for name, text in texts.items()}),
    )


def find_volumes(paths: Iterable[Path]) -> list[Volume]:
    """Opens volumes, or folders of volumes. Checks the plan, not yet the pieces.

    Raises:
        UsageError: no patch there, or volumes of two patches.
        DamageError: the plan is not as it was written.
        PolicyError: a path in the plan that may not be in a bundle.
    """
    volumes: dict[int, Volume] = {}
    for path in paths:
        inside = (
            [path] if (path / PLAN).exists() else sorted(p.parent for p in path.glob(f"*/{PLAN}"))
        )
        if not inside:
            raise UsageError(
                f"{path}: no patch: there is no {PLAN}.",
                suggest_path(path, _REMEDY),
            )
        for root in inside:
            volume = _open(root)
            first = next(iter(volumes.values()), volume)
            if volume.plan.id != first.plan.id:
                raise UsageError(
                    f"{root}: a volume of another patch than {first.root}.",
                    "Give volumes of one patch.",
                )
            volumes.setdefault(volume.number, volume)
    return list(volumes.values())


def check_pieces(volume: Volume, progress: Callable[[int], None]) -> None:
    """Reads every piece of a volume.

    Raises:
        DamageError: one is missing or not as it was written.
    """
    sizes = volume.plan.pieces
    for piece in volume.pieces:
        digest, path = sha256(), volume.path_of(piece)
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != sizes[piece]:
                raise _damaged(path, f"not a file of {sizes[piece]} bytes")
            with open(path, "rb", buffering=0) as source:
                while data := source.read(2**20):
                    digest.update(data)
                    progress(len(data))
        except OSError as error:
            raise _damaged(path, error.strerror or "cannot be read") from None
        if digest.hexdigest() != piece:
            raise _damaged(path, f"sha256 {digest.hexdigest()}")


def _damaged(path: Path, found: str) -> DamageError:
    return DamageError(
        f"{path}: the patch is damaged here ({found}). The bundle was not touched.",
        "Copy this volume again: rsync -c.",
    )


def _open(root: Path) -> Volume:
    try:
        data, sealed = read_file(root / PLAN), read_file(root / TAG_MANIFEST)
    except OSError as error:
        raise _damaged(Path(error.filename or root), error.strerror or "cannot be read") from None
    if parse_manifest(sealed).get(PLAN) != sha256_of_bytes(data):
        raise _damaged(root / PLAN, f"not the sha256 that {TAG_MANIFEST} has")
    file = str(root / PLAN)
    document = read_document(data, file, "a patch", (FORMAT,), _REMEDY)
    fields = Fields(document.data, f"{file}: not a patch", _REMEDY)
    plan = _plan(fields, file)
    number = fields.take("volume", int)
    if not 1 <= number <= plan.count:
        fields.wrong("volume", f"should be from 1 to {plan.count}")
    return Volume(root, number, plan)


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
    pieces = fields.inside("pieces")
    plan = PatchPlan(
        kind=fields.choice("kind", KINDS) or fields.missing("kind"),
        base=fields.hex("base"),
        target=fields.hex("target"),
        contents={digest: _content(contents.inside(digest)) for digest in _digests(contents)},
        repair=repair,
        tags={path: tags.hex(path) for path in tags.data},
        volumes={digest: pieces.take(digest, int) for digest in _digests(pieces)},
        count=fields.take("volumes", int),
    )
    _check_pieces(plan, fields)
    if len(set(repair)) != len(repair):
        fields.fail("names a file twice", "repair")
    if any(not path.startswith("data/") for path in repair):
        fields.fail("names a file outside `data/`", "repair")
    if any(path.startswith("data/") for path in tags.data):
        fields.fail("names a file of `data/`", "tags")
    for path, digest in plan.tags.items():
        if digest not in plan.contents or not plan.contents[digest].is_whole:
            tags.fail("has no whole content", path)
    return plan


def _check_pieces(plan: PatchPlan, fields: Fields) -> None:
    sizes = {
        (p.sha256, p.end - p.start) for content in plan.contents.values() for p in content.pieces
    }
    if len(sizes) != len(plan.pieces):
        fields.fail("has a piece of two sizes", "contents")
    if set(plan.pieces) != set(plan.volumes):
        fields.fail("names other pieces than `contents`", "pieces")
    if not 1 <= plan.count <= max(1, len(plan.volumes)):
        fields.wrong("volumes", "should be the number of volumes, none of them empty")
    if any(not 1 <= number <= plan.count for number in plan.volumes.values()):
        fields.fail("names a volume that there is not", "pieces")


def _digests(fields: Fields) -> list[str]:
    for key in fields.data:
        if not is_hex(key, 64):
            fields.fail("should have a sha256 for a name", key)
    return list(fields.data)


def _content(fields: Fields) -> Content:
    rows = fields.rows("pieces", "start", "end", "sha256")
    pieces = tuple(Piece(r.take("start", int), r.take("end", int), r.hex("sha256")) for r in rows)
    size, at = fields.take("size", int), 0
    for piece in pieces:
        if not at <= piece.start < piece.end <= size:
            fields.fail(f"should be in order, apart, and end by {size}", "pieces")
        at = piece.end
    return Content(size, pieces)
