"""The parsers of foreign files. For any bytes, each returns a value or fails with a clear message.

`test_fuzz.py` feeds them with what once broke one. `scripts/fuzz` searches with libFuzzer, for
hours.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from stage.bundle.bundle import (
    BAG_INFO,
    BAGIT,
    LOCK,
    MANIFEST,
    SIGNATURE,
    TAG_MANIFEST,
    Bundle,
    manifest_text,
    parse_manifest,
    verify,
)
from stage.bundle.inspect import safetensors_header
from stage.bundle.receipt import read_report
from stage.bundle.signature import signed_by
from stage.errors import StageError, as_shown
from stage.files import sha256_of_bytes
from stage.lock.manifest import Manifest
from stage.lock.model import read_lock
from stage.lock.requests import as_lock_request
from tests.stage.bundles import make_bundle
from tests.stage.locks import canonical

CORPUS = Path(__file__).parent / "corpus"
# The first byte selects the file that is replaced; its parity decides whether a seal covers it.
TAGS = (
    BAGIT,
    BAG_INFO,
    MANIFEST,
    TAG_MANIFEST,
    LOCK,
    SIGNATURE,
)


def lock(data: bytes, folder: Path) -> None:
    """A value that is read is written back unchanged."""
    parsed = read_lock(data, "x.lock")
    assert read_lock(parsed.to_json(), "x.lock") == canonical(parsed)


def manifest(data: bytes, folder: Path) -> None:
    """Every request can also be written into a lock."""
    path = folder / "m.yaml"
    path.write_bytes(data)
    parsed = Manifest.load(path)
    for request in parsed.requests.values():
        json.dumps(as_lock_request(request), ensure_ascii=False).encode()


def report(data: bytes, folder: Path) -> None:
    """A value that is read is written back unchanged."""
    path = folder / "report.json"
    path.write_bytes(data)
    parsed = read_report(path)
    path.write_text(json.dumps(parsed.to_json()))
    again = read_report(path)
    assert (again.findings, again.bundle_id) == (parsed.findings, parsed.bundle_id)
    for finding in parsed.findings:
        as_shown(str(finding)).encode()


def safetensors(data: bytes, folder: Path) -> None:
    """Every tensor is inside the file."""
    path = folder / "model.safetensors"
    path.write_bytes(data)
    for tensor in safetensors_header(path).values():
        assert 0 <= tensor["data_offsets"][0] <= tensor["data_offsets"][1] <= len(data)


@cache
def _bundle() -> Path:
    folder = tempfile.mkdtemp(prefix="airlift-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_bundle(Path(folder) / "bundle", big=False).root


def bag(data: bytes, folder: Path) -> None:
    """Replaces one file beside the payload of a bundle; verifies the bundle, opens and shows it."""
    root = folder / "bundle"
    if not root.exists():
        shutil.copytree(_bundle(), root)
    name = TAGS[(data[0] >> 1 if data else 0) % len(TAGS)]
    try:
        (root / name).write_bytes(data[1:])
        if data and data[0] & 1 and name != TAG_MANIFEST:
            digests = parse_manifest((_bundle() / TAG_MANIFEST).read_bytes())
            (root / TAG_MANIFEST).write_bytes(
                manifest_text({**digests, name: sha256_of_bytes(data[1:])})
            )
        report = verify(root, "fast")
        json.dumps(report.to_json()).encode()
        assert (
            not report.ok
            or name in (SIGNATURE, BAG_INFO)
            or (root / name).read_bytes() == (_bundle() / name).read_bytes()
        ), "a changed file was taken for a sound one"
        signed_by(root)
        Bundle.open(root)
    finally:
        for changed in (name, TAG_MANIFEST):
            if (_bundle() / changed).exists():
                shutil.copyfile(_bundle() / changed, root / changed)
            else:
                (root / changed).unlink(missing_ok=True)


PARSERS: Mapping[str, Callable[[bytes, Path], None]] = {
    "bag": bag,
    "lock": lock,
    "manifest": manifest,
    "report": report,
    "safetensors": safetensors,
}


def survives(target: str, data: bytes, folder: Path) -> None:
    """Feeds a parser. Passes if it returns, or raises a StageError with a remedy."""
    try:
        PARSERS[target](data, folder)
    except StageError as error:
        for part in error.parts or (error,):  # several mistakes at once have one each
            assert part.message and part.remedy, f"without a remedy: {part}"
        as_shown(str(error)).encode()
