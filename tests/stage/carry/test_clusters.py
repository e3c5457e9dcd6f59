"""`clusters.yaml`: what `--to` means, mistakes with file:line, and lines that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage.carry.clusters import Cluster, find_cluster, note
from stage.carry.ssh import PushTarget
from stage.errors import Place, UsageError
from tests.remedies.obeyed import in_it, obeys

FILE = "stage/carry/clusters.py"
TEXT = """\
# of our group
gauss:
  host: me@gauss.example.org
  folder: ~/airlift   # on the fast disk
  profile: profiles/gauss.yml
  modules: [cuda/12.2]
  setup: export OMP_NUM_THREADS=1
  partition: gpu
  account: phys-42
  time: 60
  verify: job
  copy: dtn.gauss.example.org
disk: {folder: /media/disk}
bare: {host: bare}
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file and a clusters.yaml; the user has none."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "clusters.yaml").write_text(TEXT)
    return folder


def test_a_name_has_what_its_entry_says(runs: Path) -> None:
    assert find_cluster("gauss", runs / "my.yaml") == Cluster(
        name="gauss",
        target=PushTarget("me@gauss.example.org", "airlift"),
        place=Place(f"{runs}/clusters.yaml", 2),
        file=runs / "clusters.yaml",
        host="me@gauss.example.org",
        folder="~/airlift",
        profile=runs / "profiles/gauss.yml",
        setup=("export OMP_NUM_THREADS=1",),
        modules=("cuda/12.2",),
        partition="gpu",
        account="phys-42",
        time="60",
        verify="job",
        copy="dtn.gauss.example.org",
    )
    assert find_cluster("disk", runs).target == PushTarget(None, "/media/disk")
    # A command without a run file: above `runs`.
    assert find_cluster("disk", runs.parent).place == Place(f"{runs}/clusters.yaml", 13)


@obeys(FILE, "If it is a host, give a folder there too: --to {}:FOLDER. Which folders it has:")
def test_a_name_that_nobody_knows_gets_those_that_are_known(runs: Path) -> None:
    with pytest.raises(UsageError, match=r"no cluster has that name.*gauss \(.*disk") as error:
        find_cluster("gaus", runs)
    assert "Did you mean `gauss`?" in error.value.remedy
    given = in_it(error.value.remedy, r"(?<=--to )\S+:FOLDER").replace("FOLDER", "x")
    assert find_cluster(given, runs).target == PushTarget("gaus", "x")
    assert find_cluster("gaus", runs, needs_folder=False).target == PushTarget("gaus", ".")
    with pytest.raises(UsageError, match=r"there is no clusters\.yaml"):
        find_cluster("gauss", None)
    with pytest.raises(UsageError, match="names no host"):
        find_cluster("-oProxyCommand=x", runs, needs_folder=False)


@obeys(FILE, "Add `folder:`, a path there. Which folders it has:")
def test_an_entry_without_a_folder_is_for_the_probe_alone(runs: Path) -> None:
    with pytest.raises(UsageError, match=r"clusters.yaml:14: `bare` has no `folder`") as error:
        find_cluster("bare", runs)
    assert "stage env probe --to bare" in error.value.remedy
    assert find_cluster("bare", runs, needs_folder=False).target == PushTarget("bare", ".")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  hots: x", ":4: unknown key `hots` in `a`"),
        ("  partition: -x", ":4: `a.partition` is not a name that Slurm accepts, found `-x`"),
        ("  copy: a b", ":4: `a.copy` names no host"),
        ("  verify: later", ":4: `a.verify` must be `login` | `job`, found `later`"),
        ("  setup: {a: b}", ":4: `a.setup` must be a list of text"),
    ],
)
def test_a_mistake_has_its_line(runs: Path, line: str, message: str) -> None:
    (runs / "clusters.yaml").write_text(f"a:\n  host: h\n  folder: f\n{line}\n")
    with pytest.raises(UsageError) as error:
        find_cluster("a", runs)
    assert message in error.value.message and "mistakes" not in error.value.message


def test_what_was_found_is_added_and_what_is_there_is_kept(runs: Path) -> None:
    file = runs / "clusters.yaml"
    said = note(file, "gauss", {"host": "me@other", "folder": "~/airlift", "setup": "x"})
    assert file.read_text() == TEXT
    assert said == [
        f"{file}:3: kept: `host: me@gauss.example.org`; found: `me@other`",
        f"{file}:7: kept: `setup: export OMP_NUM_THREADS=1`; found: `x`",
    ]
    note(file, "newton", {"host": "newton", "folder": "/a b", "setup": "export PATH=$PATH:/x"})
    assert find_cluster("newton", runs).target == PushTarget("newton", "/a b")
    assert note(file, "newton", {"host": "newton"}) == []
    said = note(file, "newton", {"partition": "gpu", "time": "60", "host": "n"})
    added = '  partition: gpu\n  time: "60"\n  host: newton\n  folder: "/a b"\n'
    assert file.read_text() == f'{TEXT}newton:\n{added}  setup: "export PATH=$PATH:/x"\n'
    assert said == [
        f'{file}: `newton`: partition: gpu; time: "60"',
        f"{file}:16: kept: `host: newton`; found: `n`",
    ]
    said = note(file, "bare", {"partition": "gpu"})
    assert said == [f"{file}:14: add to `bare`: partition: gpu"]
    assert "bare: {host: bare}\n" in file.read_text()
    note(runs / "new/clusters.yaml", "a.b", {"host": "h", "folder": "f"})
    assert find_cluster("a.b", runs / "new").target == PushTarget("h", "f")


@pytest.mark.parametrize(
    ("to", "host", "folder"),
    [
        ("/media/disk", None, "/media/disk"),
        ("./disk", None, "./disk"),
        ("../disk", None, "../disk"),
        ("disk/", None, "disk"),
        ("alias:x", "alias", "x"),
        ("me@host:/scratch/me/x/", "me@host", "/scratch/me/x"),
    ],
)
def test_what_is_no_name_is_a_folder_or_a_host_with_one(
    runs: Path, to: str, host: str | None, folder: str
) -> None:
    assert find_cluster(to, runs).target == PushTarget(host, folder)


@pytest.mark.parametrize(
    ("cluster", "way"),
    [
        (Cluster(name="h:x/", target=PushTarget("h", "x/")), "--to h:x-2"),
        (Cluster(name="h:a b", target=PushTarget("h", "a b")), "--to 'h:a b-2'"),
        (
            Cluster(name="g", target=PushTarget("h", "/x"), file=Path("c.yaml")),
            "repeat the lines of `g` in c.yaml under another name, with `folder: /x-2`; then --to "
            "that name",
        ),
    ],
)
def test_another_folder_there_is_one_beside(cluster: Cluster, way: str) -> None:
    assert cluster.beside() == way
