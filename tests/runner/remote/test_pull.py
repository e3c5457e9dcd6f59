"""`runner pull`: from a real sshd, killed and cut, and from hosts that do not answer honestly."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from runner.from_stage import StageError
from runner.remote import pull as pulling
from runner.remote.pull import Disk, Wanted, bring
from runner.run_folder.layout import EXPORTED
from tests.remedies.obeyed import in_it, obeys
from tests.runner.folders import run_folder
from tests.runner.remote.conftest import Laptop
from tests.runner.remote.far import GO
from tests.runner.remote.test_disk import small

DIGEST = "0" * 64


@pytest.fixture
def far(laptop: Laptop, programs: Path) -> Path:
    """A finished run on the cluster."""
    for name in ("sort", "python3"):
        if not (programs / name).exists():
            (programs / name).symlink_to(shutil.which(name) or name)
    root = run_folder(laptop.there / "output/my", name="my", **{EXPORTED: 40})
    (root / "model").mkdir()
    (root / "model/model.safetensors").write_bytes(os.urandom(300_000))
    (root / "model/config.json").write_text('{"model_type": "bert"}')
    (root / "checkpoints/step-20/rank-0.pt").write_bytes(b"20")
    (root / "checkpoints/step-9").mkdir()
    (root / "checkpoints/step-9/rank-0.pt").write_bytes(b"9")
    (root / "logs/rank-0.log").write_text("no result")
    shutil.copy(GO, laptop.there)
    return root


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def results(root: Path) -> dict[str, bytes]:
    """What a pull brings of a run."""
    own = files(root)
    return {name: own[name] for name in own if not name.startswith(("checkpoints", "logs"))}


OURS = {"pulled.json", "report.html"}


def test_results_come_whole_once_and_only_what_changed_later(laptop: Laptop, far: Path) -> None:
    said = laptop.runner("pull", "runs/my.yaml", "--to", "far")
    here = laptop.folder / "output/my"
    got = files(here)
    assert {name: got[name] for name in got.keys() - OURS} == results(far)
    assert b"<html" in got["report.html"] and "every byte compared" in said
    assert "step 40 of 40; model: output/my/model" in said
    assert "checkpoints: where it ran" in laptop.runner("status", "output/my")
    before = {path: path.stat().st_mtime_ns for path in here.rglob("model/*")}
    # Another state there: a model in two files, a longer log.
    (far / "model/model.safetensors").unlink()
    (far / "model/model-00001-of-00002.safetensors").write_bytes(b"1")
    with open(far / "metrics.jsonl", "a") as log:
        log.write("{}\n")
    said = laptop.runner("pull", "my", "--to", "far", "--checkpoints", "-o", "output/my")
    got = files(here)
    assert {name: got[name] for name in got.keys() - OURS} == {
        **results(far),
        "checkpoints/step-20/rank-0.pt": b"20",
        "checkpoints/step-20/files.json": b"{}",
    }
    assert (here / "model/config.json").stat().st_mtime_ns == before[here / "model/config.json"]
    # The checkpoint stays, where none is asked for.
    laptop.runner("pull", "my", "--to", "far")
    assert "checkpoints/step-20/rank-0.pt" in files(here)


@obeys("runner/remote/pull.py", "Give another: -o {}")
def test_another_laptop_can_pull_and_a_folder_of_its_own_run_is_left_alone(
    laptop: Laptop, far: Path, tmp_path: Path
) -> None:
    own = run_folder(laptop.folder / "output/my")
    before = files(own)
    refused = laptop.runner("pull", "runs/my.yaml", "--to", "far", code=2)
    assert "is not a folder that `runner pull` made" in refused and files(own) == before
    said = laptop.runner(
        "pull", "runs/my.yaml", "--to", f"cluster:{laptop.there}", "-o", "elsewhere"
    )
    assert results(far).items() <= files(laptop.folder / "elsewhere").items()
    option = in_it(refused, r"-o \S+").split()
    laptop.runner("pull", "runs/my.yaml", "--to", "far", *option)
    assert results(far).items() <= files(laptop.folder / option[1]).items()
    said = laptop.runner("pull", "nothing", "--to", "far", "-o", "nothing", code=2)
    assert "has no run 'nothing'" in said and "runner status --to far" in said
    assert not (laptop.folder / "nothing").exists()


def test_two_runs_of_one_name_are_never_mixed(laptop: Laptop, far: Path, tmp_path: Path) -> None:
    laptop.runner("pull", "my", "--to", "far")
    before = files(laptop.folder / "output/my")
    shutil.rmtree(far / "model")
    disk = ("pull", "my", "--to", f"{on_disk(tmp_path / 'carried', far).folder}/")
    refused = laptop.runner(*disk, code=2)
    assert f"has results of cluster:{laptop.there}, and these are of {disk[-1][:-1]}" in refused
    assert files(laptop.folder / "output/my") == before
    for _ in range(2):  # again: into the same folder
        option = in_it(laptop.runner(*disk, code=2), r"-o \S+").split()
        assert "step 40 of 40; no model came\n" in laptop.runner(*disk, *option)
    assert results(far).items() <= files(laptop.folder / "output/my-2").items()
    # The same source, where the model is gone: what is here is not called the one that came.
    said = laptop.runner("pull", "my", "--to", "far")
    assert "40; no model came; output/my/model is of an earlier pull\n" in said


def test_a_sweep_brings_each_of_its_runs(laptop: Laptop, far: Path) -> None:
    root = far.with_name("sweep")
    for seed in (1, 2):
        run_folder(root / f"seed={seed}", name="sweep", steps=seed)
    run_folder(root / "notes", name="sweep")
    laptop.runner("pull", "sweep", "--to", "far")
    got = files(laptop.folder / "output/sweep")
    assert {name.split("/")[0] for name in got} == {"seed=1", "seed=2", "pulled.json"}
    assert got["seed=2/metrics.jsonl"] == (root / "seed=2/metrics.jsonl").read_bytes()


def hostile(laptop: Laptop, far: Path, *lines: str, then: str = "") -> None:
    """The cluster's go.sh lists these lines."""
    (laptop.there / "go.sh").write_text(
        f"cat <<'END'\n{chr(10).join(lines)}\nEND\ncd '{far}'\n{then}\n"
    )


def test_names_that_no_result_has_are_refused_and_nothing_is_written_outside(
    laptop: Laptop, far: Path
) -> None:
    good = hashlib.sha256((far / "metrics.jsonl").read_bytes()).hexdigest()
    size = (far / "metrics.jsonl").stat().st_size
    (far / "link").symlink_to("/etc/passwd")
    names = [
        "../../.bashrc", "/etc/cron.d/x", "model/../../x", "model/..", "model", ".bashrc", "x.py",
        "model/.hidden", "checkpoints/step-1/../../../x", "model/a\\nb", "model//x",
        "model/.git/config", "model/.pull",
        "a/config.yaml", "=/config.yaml", "../a=b/config.yaml", "pulled.json", ".pull/x",
        "model/a b", "logs/x", "model/-x", "seed=1/../config.yaml", "config.yaml/x",
        "checkpoints/step-x/a",
    ]  # fmt: skip
    lines = [f"1 {DIGEST} {name}" for name in names]
    lines += [f"{size} {good} metrics.jsonl", *[f"1 {DIGEST} report.html"] * 2]
    lines += [
        "- link model/passwd",
        f"1 {DIGEST} model/x\x1b[2J",
        "",
        "nonsense",
        f"-5 {DIGEST} model/x",
    ]
    lines += [f"1 {DIGEST[1:]} model/y", f"9{'9' * 30} {DIGEST} model/z"]
    lines += [f"1 {DIGEST} model/../a", f"b\n{size} {good} ../../../b"]  # a name of two lines
    hostile(laptop, far, *lines)
    before = files(laptop.folder)
    said = laptop.runner("pull", "my", "--to", "far", code=1)
    after = files(laptop.folder)
    new = {name for name in after.keys() - before.keys() if not name.startswith(".cache")}
    assert new == {"output/my/metrics.jsonl", "output/my/pulled.json"}, new
    assert said.count("refused: ") == len(lines) - 1
    assert "../../.bashrc: has a name that no result has" in said and "\x1b" not in said
    assert "report.html: is listed twice" in said and "model/passwd: is a link" in said
    (laptop.there / "go.sh").write_text("exit 0\n")
    assert "my has no results yet" in laptop.runner("pull", "my", "--to", "far", code=2)


def test_a_file_that_is_refused_holds_back_what_it_belongs_to(laptop: Laptop, far: Path) -> None:
    (far / "checkpoints/step-20/engine").mkdir()
    (far / "checkpoints/step-20/engine/.metadata").write_bytes(b"of torch")
    pull = ("pull", "my", "--to", "far", "--checkpoints")
    laptop.runner(*pull)
    here = laptop.folder / "output/my"
    before = files(here)
    assert before["checkpoints/step-20/engine/.metadata"] == b"of torch"
    own = {**results(far), "checkpoints/step-20/rank-0.pt": b"new", "model/new": b"new"}
    lines = [f"{len(c)} {hashlib.sha256(c).hexdigest()} {n}" for n, c in own.items()]
    hostile(laptop, far, *lines, "- unreadable model/model.safetensors",
            "- name checkpoints/step-20/engine/?")  # fmt: skip
    said = laptop.runner(*pull, code=1)
    assert "model/model.safetensors: cannot be read there" in said
    assert "no model came; output/my/model is of an earlier pull" in said
    assert files(here) == before
    hostile(laptop, far, "- link model")
    assert "0 files" in laptop.runner(*pull, "-o", "other", code=1)


def test_more_bytes_than_listed_do_not_come_and_fewer_are_refused(
    laptop: Laptop, far: Path
) -> None:
    content = (far / "model/model.safetensors").read_bytes()
    less = hashlib.sha256(content[:1000]).hexdigest()
    hostile(laptop, far, f"1000 {less} model/model.safetensors")
    said = laptop.runner("pull", "my", "--to", "far", "--checkpoints", code=1)
    assert said.count("refused: ") == said.count("refused: checkpoints: there is none\n") == 1
    assert (laptop.folder / "output/my/model/model.safetensors").read_bytes() == content[:1000]
    more = hashlib.sha256(content + b"x").hexdigest()
    hostile(laptop, far, f"{len(content) + 1} {more} model/model.safetensors")
    said = laptop.runner("pull", "my", "--to", "far", code=1)
    assert "model/model.safetensors" in said
    assert (laptop.folder / "output/my/model/model.safetensors").read_bytes() == content[:1000]
    huge = 10**17
    hostile(laptop, far, f"{huge} {more} model/model.safetensors")
    said = laptop.runner("pull", "my", "--to", "far", code=5)
    assert "the results still need" in said


def test_a_byte_that_changes_during_the_pull_is_refused_by_name(laptop: Laptop, far: Path) -> None:
    lists = (laptop.there / "go.sh").read_text()
    (laptop.there / "real.sh").write_text(lists)
    (laptop.there / "go.sh").write_text(
        f'sh {laptop.there}/real.sh "$@"\n'
        f"cat {far}/model/config.json >{laptop.there}/old\n"
        f"{{ printf y; tail -c +2 {laptop.there}/old; }} >{far}/model/config.json\n"
    )
    said = laptop.runner("pull", "my", "--to", "far", code=1)
    assert "1 file refused, the first: model/config.json" in said
    here = laptop.folder / "output/my"
    assert not (here / "model").exists() and (here / "metrics.jsonl").exists()
    (laptop.there / "go.sh").write_text(lists)
    laptop.runner("pull", "my", "--to", "far")
    got = files(here)
    assert results(far).items() <= got.items() and not (here / ".pull").exists()


def test_what_becomes_a_pipe_there_is_not_waited_for(laptop: Laptop, far: Path) -> None:
    own, mkfifo = f"{far}/model/config.json", shutil.which("mkfifo")
    hostile(laptop, far, f"2 {DIGEST} model/config.json", then=f"rm {own}; {mkfifo} {own}")
    said = laptop.runner("pull", "my", "--to", "far", code=5)
    assert "model/config.json: not a file" in said and "cannot be read there" in said


def test_a_folder_here_that_became_a_link_is_not_written_through(far: Path, tmp_path: Path) -> None:
    disk, out = on_disk(tmp_path / "carried", far), tmp_path / "out"
    assert bring(disk, "my", out, Wanted()) == 0
    mine = tmp_path / "mine"
    (out / "model").rename(mine)
    (mine / "config.json").write_text("mine")
    (out / "model").symlink_to(mine)
    before = files(mine)
    with pytest.raises(StageError, match="model in it is a link to another folder") as refused:
        bring(disk, "my", out, Wanted())
    assert files(mine) == before and not (out / ".pull").exists()
    assert bring(disk, "my", Path(in_it(refused.value.remedy, r"(?<=-o )\S+")), Wanted()) == 0


@pytest.mark.parametrize(
    "torn", [b"[]", b'{"files": 5}', b'{"files": [1, null]}', b'{"source": {}}', b"\0", b""]
)
def test_a_torn_mark_of_an_earlier_pull_is_no_obstacle(
    far: Path, tmp_path: Path, torn: bytes
) -> None:
    disk, out = on_disk(tmp_path / "carried", far), tmp_path / "out"
    out.mkdir()
    (out / "pulled.json").write_bytes(torn)
    assert bring(disk, "my", out, Wanted()) == 0
    assert results(far).items() <= files(out).items()


def on_disk(folder: Path, root: Path, run: str = "my") -> Disk:
    """A carried disk with the results of a run, as `go.sh --results` writes them."""
    own, to = results(root), folder / "results" / run
    for name, content in own.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(content)
    lines = [f"{len(c)} {hashlib.sha256(c).hexdigest()} {n}\n" for n, c in own.items()]
    (to / "results.sha256").write_text("".join(lines))
    return Disk(folder, str(folder))


def test_an_interruption_leaves_the_old_results_as_they_were(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, out = on_disk(tmp_path / "carried", far), tmp_path / "out"
    assert bring(disk, "my", out, Wanted()) == 0
    before = files(out)
    (far / "model/model.safetensors").write_bytes(os.urandom(5_000_000))
    (far / "model/config.json").write_text("{}")
    disk = on_disk(tmp_path / "carried", far)
    real = Disk.stream

    def stops(self: Disk, run: str, name: str, offset: int, sink: object) -> None:
        def take(part: bytes) -> None:
            sink(part[:1000])  # type: ignore[operator]
            raise KeyboardInterrupt

        real(self, run, name, offset, take if name.endswith("safetensors") else sink)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "stream", stops)
        with pytest.raises(KeyboardInterrupt):
            bring(disk, "my", out, Wanted())
    after = {name: text for name, text in files(out).items() if not name.startswith(".pull")}
    assert after == before
    assert bring(disk, "my", out, Wanted()) == 0
    assert results(far).items() <= files(out).items() and not (out / ".pull").exists()


def test_two_pulls_into_one_folder_are_told_apart(far: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(StageError, match="nothing was submitted to this folder"):
        bring(Disk(tmp_path / "carried", "carried"), "my", out, Wanted())
    disk = on_disk(tmp_path / "carried", far)
    with (
        pulling._own(out, str(disk.folder), "my"),
        pytest.raises(StageError, match="another `runner pull` is at work"),
    ):
        bring(disk, "my", out, Wanted())


@obeys("runner/remote/pull.py", "Free space there, or give another folder: -o FOLDER.")
def test_a_full_disk_here_leaves_no_half_file(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, out = on_disk(tmp_path / "carried", far), tmp_path / "full/out"
    out.parent.mkdir()
    with small(out.parent):
        with pytest.raises(StageError, match="the results still need") as full:
            bring(disk, "my", out, Wanted())
        assert not out.exists()
        other = tmp_path / in_it(full.value.remedy, "(?<=-o )FOLDER")
        assert bring(disk, "my", other, Wanted()) == 0
        # It fills while the file comes.
        monkeypatch.setattr(pulling, "_check_room", lambda *_: None)
        with pytest.raises(OSError, match="No space"):
            bring(disk, "my", out, Wanted())
        assert {name.split("/")[0] for name in files(out)} == {".pull"}
