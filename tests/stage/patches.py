"""Plans of patches for tests: any valid plan, by hypothesis."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from stage.bundle import bundle as layout
from stage.bundle.bundle import manifest_text
from stage.carry.patch import KINDS, PLAN, PatchPlan
from stage.digests import sha256_of_bytes
from stage.paths import problem_with_path
from tests.stage.locks import hexes


def sealed(root: Path, plan: bytes) -> Path:
    """A patch's folder with this plan, sealed by its tag manifest; without contents."""
    (root / PLAN).write_bytes(plan)
    (root / layout.TAG_MANIFEST).write_bytes(manifest_text({PLAN: sha256_of_bytes(plan)}))
    return root


@st.composite
def plans(draw: st.DrawFn) -> PatchPlan:
    """Any valid plan."""
    names = draw(
        st.lists(st.sampled_from((*layout.TAG_FILES, layout.TAG_MANIFEST)), max_size=3, unique=True)
    )
    tags = {name: draw(hexes[64]) for name in names}
    files = draw(st.dictionaries(hexes[64], st.integers(0, 2**40), max_size=3))
    paths = st.text("abé ./%", min_size=1, max_size=8).map(lambda p: f"data/{p}")
    repair = draw(
        st.lists(paths.filter(lambda p: problem_with_path(p) is None), max_size=3, unique=True)
    )
    return PatchPlan(
        kind=draw(st.sampled_from(KINDS)),
        base=draw(hexes[64]),
        target=draw(hexes[64]),
        contents=files | {digest: draw(st.integers(0, 2**20)) for digest in tags.values()},
        repair=tuple(repair),
        tags=tags,
    )
