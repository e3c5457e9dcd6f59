"""The golden of verdicts: 300 damages, and what `stage verify` and `stage-verify.py` say.

Each line of the golden is one damage to one bundle: the exit code, and the parts of the JSON report
that do not depend on where the bundle lies. What is as in a sound bundle is left out, and a digest
is named by what it is a digest of. Where the two verifiers differ, the line has both.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from stage.cli import main
from tests.golden.bags import many, sha256, small, tiny, write_bag
from tests.stage.damages import DAMAGES
from tests.support.staging import run_here

SEED = 20_260_203
ROUNDS = {"tiny": 8, "small": 12, "many": 2}  # x 14 damages = 308
MAKERS: dict[str, Callable[[], dict[str, bytes]]] = {"tiny": tiny, "small": small, "many": many}
SHOWN = 6  # findings of a report; the others are one digest
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
_ALMOST = re.compile(r"[^\s<>`]{58,}")  # a digest with a changed letter
Verdict = dict[str, Any]


def record(folder: Path) -> str:
    """Damages each bundle in every way, and lets both verify it."""
    # In memory: there it costs nothing to remove 300 folders.
    with (
        tempfile.TemporaryDirectory(
            dir="/dev/shm" if Path("/dev/shm").is_dir() else folder
        ) as name,
        _Standalone(_shipped(folder)) as standalone,
    ):
        return "".join(
            json.dumps(row, ensure_ascii=False) + "\n"
            for size in MAKERS
            for row in _of_size(Path(name), size, standalone)
        )


def _of_size(folder: Path, size: str, standalone: _Standalone) -> Iterator[Verdict]:
    sound = write_bag(folder / f"{size}-sound", MAKERS[size]())
    root = folder / size / "bundle"
    shutil.copytree(sound, root)
    judge = _Judge(root, standalone, sound)
    yield {"damage": f"{size} none", **judge.sound}
    for damage in DAMAGES:
        for number in range(ROUNDS[size]):
            name = f"{size} {damage.__name__} {number}"
            damage(root, random.Random(f"{SEED} {name}"))
            yield {"damage": name, **judge.verdict()}
            if number % 10 == 0:
                yield {"damage": f"{name} --fast", **judge.verdict("--fast")}
            shutil.rmtree(folder / size)  # a damage may add files beside the bundle, too
            shutil.copytree(sound, root)


class _Judge:
    """Lets both verify a bundle. `sound`: what both say while it is sound."""

    def __init__(self, root: Path, standalone: _Standalone, sound: Path) -> None:
        self._root, self._standalone = root, standalone
        files = sorted((path for path in sound.rglob("*") if path.is_file()), reverse=True)
        self._names = {
            sha256(path.read_bytes()): path.relative_to(sound).as_posix() for path in files
        }
        self.sound: Verdict = {}
        self.sound = self.verdict()

    def verdict(self, *options: str) -> Verdict:
        arguments = [str(self._root), "--json", "--jobs", "1", *options]
        with tempfile.TemporaryDirectory() as state:  # nothing is known from an earlier one
            ours = CliRunner().invoke(main, ["verify", *arguments], env={"XDG_STATE_HOME": state})
        if ours.exception is not None and not isinstance(ours.exception, SystemExit):
            raise ours.exception
        code, output, errors = self._standalone.run(*arguments)
        assert "Traceback" not in ours.output + errors, ours.output + errors
        one = {"exit": ours.exit_code, **self._stable(ours.stdout)}
        other = {"exit": code, **self._stable(output)}
        return one if one == other else {"stage verify": one, "stage-verify.py": other}

    def _stable(self, output: str) -> Verdict:
        """The parts of a report that do not depend on the place of the bundle."""
        if not output:
            return {}
        report = json.loads(output)
        findings = [self._line(finding) for finding in report["findings"]]
        assert report["ok"] == (not findings)
        if len(findings) > SHOWN:
            rest = sha256("\n".join(findings[SHOWN:]).encode())[:16]
            findings[SHOWN:] = [f"and {len(findings) - SHOWN} more, sha256 {rest}"]
        facts = {
            "id": self._named(report["bundle_id"] or "none", "stage.lock"),
            "files": report["files"],
            "bytes": report["bytes"],
            "unproven": " ".join(report["proof"]["unproven"]),
        }
        different = {key: value for key, value in facts.items() if value != self.sound.get(key)}
        return {**different, **({"findings": findings} if findings else {})}

    def _line(self, finding: Verdict) -> str:
        path = finding["path"]
        expected, actual = (self._named(finding[key], path) for key in ("expected", "found"))
        return f"{path}: {finding['problem']}: expected {expected}, found {actual}"

    def _named(self, text: str, path: str) -> str:
        """Names digests by their file in the sound bundle, or as what lies at `path` now."""
        where = self._root / path

        def name(match: re.Match[str]) -> str:
            if match[0] in self._names:
                return f"<{self._names[match[0]]}>"
            is_here = where.is_file() and sha256(where.read_bytes()) == match[0]
            return "<what is there>" if is_here else "<other>"

        named = _DIGEST.sub(name, text.replace(str(self._root.parent), "<folder>"))
        return _ALMOST.sub("<no digest>", named)


def _shipped(folder: Path) -> Path:
    """The `stage-verify.py` of a bundle that `stage fetch` makes now."""
    (folder / "one").mkdir()
    (folder / "one/note.txt").write_text("one\n")
    manifest = folder / "one.yaml"
    manifest.write_text("format: 1\nname: one\nassets:\n  one:\n    path: ./one\n")
    run_here("fetch", str(manifest), "-o", str(folder / "bundle"), "--no-offline-check", "-q")
    return folder / "bundle/stage-verify.py"


class _Standalone:
    """Runs `stage-verify.py` as a script, many times in one bare Python."""

    _SERVER = """
import json, sys
code = compile(open(sys.argv[1], "rb").read(), "stage-verify.py", "exec", dont_inherit=True)
answers, path = sys.stdout, sys.path[:]
for line in sys.stdin:
    out, err, *arguments = json.loads(line)
    sys.stdout, sys.stderr, sys.path[:] = open(out, "w"), open(err, "w"), path
    sys.argv[1:] = arguments
    try:
        exec(code, {"__name__": "__main__", "__file__": "/stage-verify.py"})
    except SystemExit as ended:
        print(ended.code, file=answers, flush=True)
"""

    def __init__(self, script: Path) -> None:
        self._out, self._err = script.with_suffix(".out"), script.with_suffix(".err")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", self._SERVER, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = json.dumps([str(self._out), str(self._err), *arguments])
        print(request, file=self._process.stdin, flush=True)
        code, errors = self._process.stdout.readline(), self._err.read_text(encoding="utf-8")
        assert code, f"it ended with: {errors}"
        return int(code), self._out.read_text(encoding="utf-8"), errors

    def __enter__(self) -> _Standalone:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()
