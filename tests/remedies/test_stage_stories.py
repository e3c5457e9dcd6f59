"""Remedies of `stage` that are made by functions and tables: in manifests, tables and repairs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from runner.cli import main as runner
from runner.config.run_config import RunConfig
from runner.inputs import resolve
from stage import verify
from stage.bundle.bundle import Bundle
from stage.bundle.receipt import remedy_for_damage
from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.errors import UsageError
from stage.lock.manifest import Manifest
from tests.remedies.obeyed import in_it, obeys
from tests.remedies.test_stories import bundle, here, remedy_of, run, works
from tests.support.servers.web import serve
from tests.support.staging import model_files

__all__ = ["here"]
VERIFIER = "stage/bundle/verifier.py"
KINDS = "stage/file_kinds.py"
APPLY = "stage/carry/apply.py"
FETCH = "fetch m.yaml -o new --no-offline-check"


def manifest(files: Mapping[str, str | bytes], *top: Mapping[str, Any], **entry: Any) -> None:
    """Writes a manifest with an asset `a`, and the user's files."""
    for name, content in files.items():
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    document = {"format": 1, "name": "m", "assets": {"a": entry}}
    for more in top:
        document |= more
    Path("m.yaml").write_text(yaml.safe_dump(document))


def shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


@obeys(VERIFIER, "{first}Carry {file} to the machine with a sound bundle", "Other ways: copy again")
@obeys("stage/bundle/receipt.py", "stage verify {} names all damage")
@obeys("stage/bundle/report.py", "Give a file that `stage verify --report` wrote.")
@obeys(KINDS, "`stage lock MANIFEST` writes", "`stage verify BUNDLE --report FILE` writes")
@obeys(APPLY, "Give the folder that `stage patch -o` wrote.")
def test_damage_is_repaired_in_each_way_that_is_named() -> None:
    shutil.copytree(bundle(b="two"), "copy")
    damaged = Path("copy/data/files/a/a.txt")
    damaged.write_text("oh!")
    look = in_it(remedy_for_damage(Path("copy")), r"stage verify \S+")
    wrote = in_it(remedy_of("patch bundle --report none.json -o P", 2), r"stage verify --report")
    Path("notes.json").write_text("{}")
    remedy = remedy_of("patch bundle --report notes.json -o P", 2)
    report = in_it(remedy, "stage verify BUNDLE --report FILE")
    assert run(report.replace("BUNDLE", "copy"))[0] == 1 and Path("FILE").exists()
    lock = in_it(remedy_of("patch bundle --since m.yaml -o P", 2), "stage lock MANIFEST")
    works(lock.replace("MANIFEST", "m.yaml"))
    code, said = run(f"{look} {wrote.split()[-1]} report.json")
    words = " ".join(said.split())
    assert code == 1 and "stage patch" in remedy_for_damage(Path("copy")), "it is known now"
    works(in_it(words, r"stage patch BUNDLE --report \S+ -o PATCH").replace("BUNDLE", "bundle"))
    Path("empty").mkdir()
    assert "stage patch -o" in remedy_of("apply copy empty", 2)
    works(in_it(words, r"stage apply copy PATCH"))
    works("verify copy")

    damaged.write_text("no!")
    assert "-c" in words and "--failed LIST" in words
    assert run("verify copy --failed LIST")[0] == 1
    shell(f"rsync -rc {in_it(words, '--files-from=LIST')} bundle copy")
    works("verify copy")


@obeys("stage/bundle/bundle.py", "Run `stage fetch` again where it was made, or copy again")
@obeys(VERIFIER, "This bundle is unfinished: run `stage fetch`", "This is another bundle than")
def test_an_unfinished_bundle_and_one_of_another_id() -> None:
    root = bundle()
    (root / "tagmanifest-sha256.txt").unlink()
    code, said = run("verify bundle")
    assert code == 1 and "run `stage fetch` again where it was made" in " ".join(said.split())
    assert "stage fetch" in remedy_of("show bundle", 2)
    works("fetch m.yaml -o bundle")
    works("verify bundle")
    code, said = run(f"verify bundle --id {'ab' * 32}")
    assert code == 1
    assert in_it(" ".join(said.split()), "`stage show` where it was made prints its id")
    found = in_it(works("show bundle"), r"(?<=bundle id )[0-9a-f]{64}")
    works(f"verify bundle --id {found}")


@obeys("stage/download/responses.py", "The source changed the file, or a proxy or mirror did.")
def test_a_file_that_changed_at_its_source_is_locked_again() -> None:
    with serve() as web:
        manifest({}, url=web.url("/x.csv"))
        web.files["/x.csv"] = b"text\na film\n"
        works("fetch m.yaml -o bundle")
        web.files["/x.csv"] = b"text\na form\n"
        remedy = remedy_of(FETCH, 1)
        works(f"{FETCH} {in_it(remedy, '--update')} a")
    assert Path("new/data/files/a/x.csv").read_bytes() == b"text\na form\n"


@obeys("stage/lock/reader.py", "Use a newer airlift: update its source", "Write `format: {}`.")
@obeys(KINDS, "`stage init NAME...` writes a manifest.")
@obeys("stage/text.py", "Save it as UTF-8: iconv -f {} -t UTF-8")
def test_a_manifest_is_written_as_its_remedies_say() -> None:
    manifest({"a.txt": "x"}, path="a.txt")
    works(FETCH)
    good = Path("m.yaml").read_text()

    for wrong in ("format: 9", "format: one"):
        Path("m.yaml").write_text(good.replace("format: 1", wrong))
        line = in_it(remedy_of(FETCH, 2), r"(?<=[Ww]rite `)format: \d+")
        Path("m.yaml").write_text(good.replace("format: 1", line))
        works(FETCH)

    Path("m.yaml").write_text("")
    works(in_it(remedy_of(FETCH, 2), "stage init ").replace("stage ", "") + "a.txt -o n.yaml")
    works(FETCH.replace("m.yaml", "n.yaml").replace("new", "b"))

    Path("m.yaml").write_bytes(f"# 这是我的模型和数据集清单\n{good}".encode("gbk"))
    shell(in_it(remedy_of(FETCH, 2), "iconv .*"))
    works(FETCH)
    assert "我的模型" in Path("m.yaml").read_text()


@obeys(KINDS, "It has `channels: [conda-forge]` and")
@obeys("stage/environment/spec/environment_yml.py", "Write pip: [torch, transformers]")
@obeys("stage/environment/spec/pip_section.py", "pip wants two: {}=={}")
def test_a_pip_section_is_written_as_its_remedies_say() -> None:
    Path("e.yml").write_text("")
    with pytest.raises(UsageError) as caught:
        EnvironmentSpec.load("e.yml")
    Path("e.yml").write_text("\n".join(re.findall("`(.*?)`", caught.value.remedy)))
    assert EnvironmentSpec.load("e.yml").channels == ("conda-forge",)

    def loaded(pip: object) -> EnvironmentSpec:
        parts = {"channels": ["conda-forge"], "dependencies": ["python=3.11", "pip", {"pip": pip}]}
        Path("e.yml").write_text(yaml.safe_dump(parts))
        return EnvironmentSpec.load("e.yml")

    with pytest.raises(UsageError) as caught:
        loaded("torch=2.5")
    loaded(yaml.safe_load(in_it(caught.value.remedy, "pip: .*"))["pip"])
    with pytest.raises(UsageError) as caught:
        loaded(["torch=2.5"])
    loaded([in_it(caught.value.remedy, r"torch==\S+")])


@obeys("stage/convert/json_files.py", "Write each row as an object:", "Write one object a line")
@obeys("stage/convert/text_files.py", "Get the file again, or remove the byte: tr -d")
def test_rows_are_written_as_their_remedies_say() -> None:
    manifest({"a.json": '["a film", "another"]'}, path="a.json", convert="json")
    row = in_it(remedy_of(FETCH, 2), r"\{.*\}")
    manifest({"a.json": f"[{row.replace('value', '1')}]"}, path="a.json", convert="json")
    works(FETCH)
    manifest({"b.jsonl": '{"a": 1},\n{"a": 2}\n'}, path="b.jsonl", convert="jsonl")
    assert "all in one array: [...]" in remedy_of("fetch m.yaml -o b --no-offline-check", 2)
    for ways in ('{"a": 1}\n{"a": 2}\n', '[{"a": 1},\n{"a": 2}\n]'):
        Path("b.jsonl").write_text(ways)
        works("fetch m.yaml -o b --no-offline-check")
        shutil.rmtree("b")
        Path("m.lock").unlink()
    manifest({"FILE": b"a film\n\0another\n"}, path="FILE", convert="text")
    shell(
        in_it(remedy_of("fetch m.yaml -o c --no-offline-check", 2), r"tr -d '\\000' < FILE > NEW")
    )
    manifest({}, path="NEW", convert="text")
    works("fetch m.yaml -o c --no-offline-check")


@obeys("stage/staging/resolve.py", "Take another repository; or, after reading the licence, add it")
@obeys("stage/staging/build.py", "Fetch with the versions of the lock, or make it anew: {}")
@obeys("stage/staging/build.py", "{}: use the versions that the lock was made with, or accept")
@obeys("stage/lock/manifest.py", "Remove one of the two. For `runner train`, keep `{}`.")
def test_policies_versions_and_ways_that_do_not_go_together() -> None:
    mit, files = {"policy": {"licences": ["mit"]}}, {"a.csv": "text\na film\n"}
    manifest(files, mit, path="a.csv", convert="csv")
    remedy = remedy_of(FETCH, 3)
    licence = yaml.safe_load(in_it(remedy, r"licence: \w+"))
    assert "policy: {licences: [...]}" in remedy
    for policy, entry in ((mit, licence), ({"policy": {"licences": ["x"]}}, {"licence": "x"})):
        manifest(files, policy, path="a.csv", convert="csv", **entry)
        works(FETCH)
        shutil.rmtree("new")

    lock = Path("m.lock").read_text()
    pyarrow = in_it(lock, r'(?<="pyarrow": ")[^"]*')
    digest = next(f.sha256 for f in Bundle.open(bundle_of()).asset("a").files if f.made_by) or ""
    for before, after, code in ((pyarrow, "1.0", 2), (digest, "0" * 64, 1)):
        Path("m.lock").write_text(lock.replace(before, after))
        works(in_it(remedy_of(FETCH, code), r"stage \S+ m.yaml .*--update \S+"))
        works(FETCH)
        shutil.rmtree("new")

    both = {"dataset": "acme/lines", "config": "plain", "include": ["*.csv"]}
    manifest({}, **both)
    kept = in_it(remedy_of(FETCH, 2), r"(?<=keep `)\w+")
    for gone in {"config", "include"}:
        manifest({}, **{key: value for key, value in both.items() if key != gone})
        assert kept == "config" and Manifest.load(Path("m.yaml")).requests


def bundle_of() -> Path:
    works("fetch m.yaml -o once")
    return Path("once")


@obeys("runner/cli/start.py", "runner train --help")
@obeys("stage/cli/patch.py", "stage patch --help")
@obeys("stage/cli/transfer.py", "stage init --help")
def test_help_that_is_named_is_there() -> None:
    bundle()
    for command in ("patch bundle -o p", "init"):
        works(in_it(remedy_of(command, 2), r"stage \w+ --help"))
    said = CliRunner().invoke(runner, ["train", "--bundle", "bundle"])
    words = in_it(said.output, "runner train --help").split()
    assert CliRunner().invoke(runner, words[1:]).exit_code == 0


@obeys("stage/lock/manifest.py", "Give it one of: {}.", "Name at least one, for instance: assets:")
@obeys("stage/lock/yaml_lines.py", "Write `key: value`.", "Give the file itself, and this folder")
@obeys("stage/__init__.py", "Use one of: {}.")
def test_what_there_is_to_choose_from_can_be_chosen() -> None:
    Path("m.yaml").write_text("format: 1\nname: m\nassets: {}\n")
    line = in_it(remedy_of(FETCH, 2), r"assets: \{.*\}\}")
    Path("m.yaml").write_text(f"format: 1\nname: m\n{line}\n")
    assert Manifest.load(Path("m.yaml")).requests.keys() == {"bert"}
    values = {"url": "https://example.org/x.csv", "environment": "e.yml", "path": "a.txt"}
    for wrong in ("bert", {"licence": "mit"}):
        document = {"format": 1, "name": "m", "assets": {"a": wrong}}
        Path("m.yaml").write_text(yaml.safe_dump(document))
        kinds = in_it(remedy_of(FETCH, 2), r"(?<=one of: )[^.]*").split(", ")
        assert {*values} < {*kinds}
        for kind in kinds:
            manifest({}, **{kind: values.get(kind, "acme/some")})
            assert Manifest.load(Path("m.yaml")).requests.keys() == {"a"}

    manifest({"a.txt": "x"}, path="a.txt")
    good = Path("m.yaml").read_text()
    Path("m.yaml").write_text(f"? [name]\n: m\n{good}")
    assert in_it(remedy_of(FETCH, 2), "Write `key: value`")
    Path("m.yaml").write_text(good)
    works(FETCH)
    assert "Give the path of the file" in remedy_of("fetch . -o b", 2)

    with pytest.raises(UsageError) as caught:
        verify("new", "thorough")
    for level in in_it(caught.value.remedy, r"(?<=one of: )[^.]*").split(", "):
        assert verify("new", level, quiet=True).ok


@obeys("runner/inputs/__init__.py", "Its bytes are those that were fetched: correct the file at")
def test_a_config_that_is_none_is_corrected_at_its_source() -> None:
    Path("mine").mkdir()
    for name, data in model_files(100).items():
        Path("mine", name).parent.mkdir(exist_ok=True)
        Path("mine", name).write_bytes(data)
    good = Path("mine/config.json").read_text()
    rows = {"path": "rows.csv", "convert": "csv"}
    Path("rows.csv").write_text("text\na film\n")
    assets = {"bert": {"path": "mine", "exclude": ["*.bin", "onnx/*"]}, "rows": rows}
    Path("m.yaml").write_text(yaml.safe_dump({"format": 1, "name": "m", "assets": assets}))
    run_file = {"format": 1, "task": "masked-lm", "model": {"asset": "bert"}}
    run_file["dataset"] = {"asset": "rows"}
    Path("run.yaml").write_text(yaml.safe_dump(run_file))
    Path("mine/config.json").write_text(good.replace("}", ""))
    works(FETCH)
    with pytest.raises(UsageError, match="not JSON") as caught:
        resolve(RunConfig.load(Path("run.yaml")), Path("new"))
    Path("mine/config.json").write_text(good)
    line = in_it(caught.value.remedy, r"stage fetch MANIFEST --update ASSET -o BUNDLE")
    for word, value in {"MANIFEST": "m.yaml", "ASSET": "bert", "BUNDLE": "new"}.items():
        line = line.replace(word, value)
    works(f"{line} --no-offline-check")
    model = resolve(RunConfig.load(Path("run.yaml")), Path("new")).model
    assert (model.path / "config.json").read_text() == good
