"""Plans of patches for tests: any valid plan, by hypothesis."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from stage.bundle import bundle as layout
from stage.bundle.bundle import manifest_text
from stage.transfer.patch import KINDS, PLAN, Content, PatchPlan, Piece
from stage.util.digests import sha256_of_bytes
from stage.util.paths import problem_with_path
from tests.stage.locks import hexes


def sealed(root: Path, plan: bytes) -> Path:
    """A volume's folder with this plan, sealed by its tag manifest; without pieces."""
    (root / PLAN).write_bytes(plan)
    (root / layout.TAG_MANIFEST).write_bytes(manifest_text({PLAN: sha256_of_bytes(plan)}))
    return root


@st.composite
def contents(draw: st.DrawFn, *, whole: bool) -> Content:
    """The pieces of a file in order, with gaps between them unless the whole file is carried."""
    at, pieces = 0, []
    for digest in draw(st.lists(hexes[64], max_size=3, unique=True)):
        start = at if whole else at + draw(st.integers(0, 2**30))
        at = start + draw(st.integers(1, 2**24))
        pieces.append(Piece(start, at, digest))
    return Content(at if whole else at + draw(st.integers(0, 2**40)), tuple(pieces))


@st.composite
def plans(draw: st.DrawFn) -> PatchPlan:
    """Any valid plan."""
    files = draw(st.dictionaries(hexes[64], contents(whole=False), max_size=3))
    names = draw(
        st.lists(st.sampled_from((*layout.TAG_FILES, layout.TAG_MANIFEST)), max_size=3, unique=True)
    )
    tags = {name: draw(hexes[64]) for name in names}
    known = files | {
        digest: draw(contents(whole=True)) for digest in tags.values() if digest not in files
    }
    paths = st.text("abé ./%", min_size=1, max_size=8).map(lambda p: f"data/{p}")
    repair = draw(
        st.lists(paths.filter(lambda p: problem_with_path(p) is None), max_size=3, unique=True)
    )
    sizes: dict[str, int] = {}
    for content in known.values():
        for piece in content.pieces:
            sizes.setdefault(piece.sha256, piece.end - piece.start)
    # Two contents may have one digest for pieces of two sizes: such a plan is not valid.
    known = {
        digest: content
        for digest, content in known.items()
        if all(sizes[p.sha256] == p.end - p.start for p in content.pieces)
    }
    tags = {
        name: digest for name, digest in tags.items() if digest in known and known[digest].is_whole
    }
    pieces = {p.sha256 for content in known.values() for p in content.pieces}
    count = draw(st.integers(1, max(1, len(pieces))))
    return PatchPlan(
        kind=draw(st.sampled_from(KINDS)),
        base=draw(hexes[64]),
        target=draw(hexes[64]),
        contents=known,
        repair=tuple(repair),
        tags=tags,
        volumes={piece: draw(st.integers(1, count)) for piece in sorted(pieces)},
        count=count,
    )
