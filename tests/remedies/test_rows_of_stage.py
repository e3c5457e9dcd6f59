"""Remedies of manifests and bundles: whoever does what they say goes on."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from stage import verify
from stage.bundle.receipt import remedy_for_damage
from stage.download.http import tls_context
from stage.environment.spec.environment_yml import EnvironmentSpec
from stage.environment.spec.profile import Profile
from stage.lock.manifest import Manifest
from stage.serve.server import BundleServer
from tests.remedies.rows import Row, World, obey
from tests.support.staging import model_files

CONVERT = "stage/convert/convert.py"
CSV = "stage/convert/csv_files.py"
MANIFEST = "stage/lock/manifest.py"
LOCAL = "stage/staging/sources/local.py"
PRIVATE = "stage/private_files.py"
CHECKS = "stage/staging/resolve.py"
VERIFIER = "stage/bundle/verifier.py"
KINDS = "stage/file_kinds.py"
APPLY = "stage/carry/patch.py"
SIGNATURE = "stage/bundle/signature.py"
PROBE = Path(__file__).parents[2] / "stage/templates/env-probe.sh"
FETCH = "stage fetch m.yaml --no-offline-check"
ROWS = "text,label\na film,good\nanother,bad\n"
PNG = b"\x89PNGIEND"
KEYS = "ssh-keygen -q -t ed25519 -N '' -f KEY\necho \"me $(cat KEY.pub)\" > signers"
MODEL = {f"mine/{name}": data for name, data in model_files(100).items() if "token" not in name}


def a(**keys: Any) -> dict[str, Any]:
    """A manifest with an asset `a`."""
    return {"assets": {"a": keys}}


FILE = a(path="a.txt")
PUSH = f"{sys.executable} -m stage push bundle"
FETCHED, ANEW = f"{FETCH} -o bundle", f"{FETCH} -o new"
MANIFESTS = (
    Row(CONVERT, "Write `convert: {}`.", (("(?<=Write `)convert: [a-z]+", "edit assets.a.{}"),),
        a(path="t", convert="csv"), FETCHED, "",
        {"t/a.jsonl": '{"text": "a"}\n', "t/b.jsonl": '{"text": "b"}\n'}),
    Row(CONVERT, "Write `convert: {}`.", (("(?<=Write `)convert: [a-z]+", "edit assets.a.{}"),),
        a(path="t", convert="csv"), FETCHED, "",
        {"t/1.png": PNG, "t/2.png": PNG, "t/metadata.json": "[]"}),
    Row("stage/convert/images.py", "Copy it again from where it came, or omit it",
        ((r"exclude: \[.*?\]", "edit assets.a.{}"),), a(path="t", convert="imagefolder"),
        FETCHED, "", {"t/1.png": PNG, "t/2.jpg": b"\xff\xd8.."}),
    *(
        Row(CONVERT, "Remove `convert`", (("(?<=Remove `)convert", "remove assets.a.{}"),),
            a(path="mine", convert=how), FETCHED, "", MODEL)
        for how in ("csv", "json")
    ),
    Row(CSV, "Add to its entry: separator: {}", (("separator: \";\"", "edit assets.a.{}"),),
        a(path="a.csv", convert="csv"), FETCHED, "", {"a.csv": ROWS.replace(",", ";")}),
    Row(CSV, "A CSV begins with a line of names.", (("convert: text", "edit assets.a.{}"),),
        a(path="a.csv", convert="csv"), FETCHED, "", {"a.csv": "one\ntwo, and more\n"}),
    Row("stage/staging/sources/source.py", "Is it the right file, and the right `convert`?",
        (("convert: text", "edit assets.a.{}"),),
        a(path="a.csv", convert="csv"), FETCHED, "", {"a.csv": "a line of text\n"}),
    Row(CSV, "Get it again{}.", ((r"exclude: \[.*?\]", "edit assets.a.{}"),),
        a(path="t", convert="csv"), FETCHED, "", {"t/a.csv": ROWS, "t/b.csv": ""}),
    Row("stage/staging/sources/listing.py", "Put the file itself there, or omit it: exclude",
        ((r"exclude: \[.*?\]", "edit assets.a.{}"),),
        a(path="t"), FETCHED, "", {"t/a.txt": "x"}, "ln -s a.txt t/b.txt", code=3),
    Row(PRIVATE, "Omit them: exclude: [{}]. If they must be in the bundle, name them: include:",
        ((r"exclude: \[.*?\]", "edit assets.a.{}"), (r"include: \[.*?\]", "edit assets.a.{}")),
        a(path="t"), FETCHED, "", {"t/a.txt": "x", "t/.env": "PASSWORD=x\n"}, code=3),
    *(
        Row(MANIFEST, "Write `path: {}`",
            (("path: [^`]*", "edit assets.a: {{}}", "(?<=; `)[a-z]+(?=` names)",
              "remove assets.a.{}", *more),),
            a(**{key: name}), FETCHED, "", files)
        for key, name, files, more in (
            ("model", "./mine", MODEL, ()),
            ("dataset", "a.csv", {"a.csv": ROWS}, ("convert: csv", "edit assets.a.{}")),
            ("dataset", "a.jsonl", {"a.jsonl": '{"text": "a"}\n'},
             ("convert: jsonl", "edit assets.a.{}")),
        )
    ),
    Row(CHECKS, "Choose a folder outside of it: -o {}{}", (("-o [^ ,]*", "words"),),
        a(path="."), FETCH, "-o bundle", {"a.txt": "x"}),
    Row(CHECKS, "Choose a folder outside of it: -o {}{}", (("-o [^ ,]*", "words"),),
        a(path="t"), FETCH, "-o t/deep/bundle", {"t/a.txt": "x"}),
    Row("stage/files.py", "mkdir -p {}", (("mkdir -p [^ ]*", "run"),),
        FILE, "stage verify bundle --report new/r.json", "", {"a.txt": "x"}, FETCHED),
    Row(LOCAL, "To take the files of `{}` as they are now: {}",
        (("stage fetch m.yaml .*--update a", "run"),),
        FILE, FETCHED, "", {"a.txt": "x"}, f"{FETCHED}\necho y > a.txt"),
    Row("stage/staging/resolve.py", "stage lock {}", (("stage lock [^ ]*", "run"),),
        FILE, f"{FETCH} -o bundle --locked", "", {"a.txt": "x"}),
    Row(SIGNATURE, "Make one: ssh-keygen", (("ssh-keygen -t ed25519 -f KEY", "run {} -N ''"),),
        FILE, "stage sign bundle --key KEY", "", {"a.txt": "x"}, FETCHED),
    Row(SIGNATURE, "Where it was made: stage sign {} --key KEY;", (("stage sign .*? KEY", "run"),),
        FILE, "stage verify bundle --signers signers", "", {"a.txt": "x"},
        f"{FETCHED}\n{KEYS}", code=4),
    Row("stage/staging/working_folder.py", "Give it a folder of its own: stage fetch {} -o {}",
        (("stage fetch [^ ]* -o [^ ]*", "instead {} --no-offline-check"),),
        FILE, "stage fetch n.yaml -o bundle --no-offline-check", "",
        {"a.txt": "x", "n.yaml": "format: 1\nname: n\nassets: {a: {path: a.txt}}\n"}, FETCHED),
)  # fmt: skip


TEXTS = {f"{name}.txt": "one" if name == "a" else "two" for name in "abc"}
TWO = {"assets": {"a": {"path": "a.txt"}, "b": {"path": "b.txt"}}}
BROKEN = f"""{FETCHED}
cp -r bundle copy
printf 'oh!' > copy/data/files/a/a.txt"""
DAMAGED = f"""{BROKEN}
! stage verify copy --report report.json
stage patch bundle --report report.json -o patch"""
LINES = a(path="a.csv", convert="csv")
UPDATED = f"""{FETCHED}
cp -r bundle copy
echo another > a.txt
{FETCHED} --update a
stage patch bundle --since copy/stage.lock -o patch"""
BUNDLES = (
    Row(SIGNATURE, "Run `stage verify {}`; sign what is sound",
        (("stage verify [^` ]+", "run ! {}", "stage fetch", f"run {FETCHED}"),),
        FILE, "stage sign bundle --key KEY", "", TEXTS,
        f"{FETCHED}\n{KEYS}\nrm bundle/data/files/a/a.txt", code=1),
    Row(SIGNATURE, "Write one: a line `NAME ssh-ed25519 AAAA...` per signer",
        (("NAME ssh-ed25519 AAAA[.]{3}",
          "run echo '{}' | sed \"s#AAAA...#$(cut -d ' ' -f 2 KEY.pub)#\" > signers"),),
        FILE, "stage verify bundle --signers signers", "", TEXTS,
        f"{FETCHED}\n{KEYS}\nrm signers\nstage sign bundle --key KEY"),
    Row(APPLY, "Move it out of the bundle: mv {} ELSEWHERE", (("mv [^ ]+ ELSEWHERE", "run"),),
        TWO, "stage apply copy patch", "", TEXTS,
        f"{DAMAGED}\nrm copy/data/files/a/a.txt\nmkdir copy/data/files/a/a.txt\n"
        "touch copy/data/files/a/a.txt/mine", code=3),
    Row(APPLY, "prints the id of this bundle; make a patch for it",
        (("stage verify copy", "run", "make a patch",
          "run stage patch bundle --since copy/stage.lock -o patch2",
          "a patch", "instead stage apply copy patch2"),),
        FILE, "stage apply copy patch", "", TEXTS,
        f"{UPDATED}\nstage apply copy patch\necho third > a.txt\n{FETCHED} --update a\n"
        f"rm -r patch\ncp -r bundle third\necho fourth > a.txt\n{FETCHED} --update a\n"
        "stage patch bundle --since third/stage.lock -o patch"),
    Row(APPLY, "stage verify {} --report FILE, and repair it with stage patch --report FILE",
        (("stage verify copy --report FILE", "run ! {}", "stage patch --report FILE",
          "run stage patch old --report FILE -o repair", "repair", "run stage apply copy {}"),),
        {"assets": {name: {"path": f"{name}.txt"} for name in "abc"}}, "stage apply copy patch", "",
        TEXTS,
        f"{FETCHED}\ncp -r bundle old\ncp -r bundle copy\nsed -i 's/^  b:/  d:/' m.yaml\n"
        f"{FETCHED}\nstage patch bundle --since copy/stage.lock -o patch\n"
        "for name in b c; do printf 'oh!' > copy/data/files/$name/$name.txt; done", code=1),
    Row("stage/carry/patch.py", "Run `stage fetch` again into it, then this again",
        (("stage fetch", f"run {FETCHED}"),), TWO,
        "stage patch bundle --report report.json -o patch2", "", TEXTS,
        f"{DAMAGED}\nprintf 'no!' > bundle/data/files/a/a.txt", code=1),
    Row(MANIFEST, "List those you allow: `policy: {licences:",
        ((r"policy: \{[^}]*\}", "edit"), ("policy", "remove")),
        a(path="a.txt", licence="mit") | {"policy": {"licences": []}}, FETCHED, "", TEXTS),
)  # fmt: skip


def known_damage(world: World) -> list[str]:
    """What is said of a damaged copy, before and after it was verified."""
    world.patch.setenv("XDG_STATE_HOME", str(Path.cwd() / "state"))
    return [remedy_for_damage(Path("copy"))]


STORIES = (
    Row("stage/bundle/receipt.py", "Give a file that `stage verify --report` wrote.",
        (("stage verify --report", "run ! stage verify copy --report none.json"),),
        TWO, "stage patch bundle --report none.json -o P", "", TEXTS, BROKEN),
    Row(KINDS, "`stage verify BUNDLE --report FILE` writes",
        (("stage verify BUNDLE --report FILE", "run ! {}"),),
        TWO, "stage patch bundle --report notes.json -o P", "", {**TEXTS, "notes.json": "{}"},
        BROKEN, fill={"BUNDLE": "copy", "FILE": "notes.json"}),
    Row(KINDS, "`stage lock MANIFEST` writes", (("stage lock MANIFEST", "show"),),
        TWO, "stage patch bundle --since m.yaml -o P", "", TEXTS, FETCHED,
        fill={"MANIFEST": "m.yaml"}),
    Row(APPLY, "Give the folder that `stage patch -o` wrote.",
        (("stage patch -o", "run stage patch bundle --report report.json -o again",
          "the folder", "instead stage apply copy again"),),
        TWO, "stage apply copy empty", "", TEXTS, f"{DAMAGED}\nmkdir empty"),
    Row(VERIFIER, "Else: {first}Carry {file} there: stage patch",
        (("stage patch BUNDLE --report [^ ]+ -o PATCH", "run", "stage apply copy PATCH", "run"),),
        TWO, "stage verify copy --report report.json", "", TEXTS, BROKEN, code=1),
    Row(VERIFIER, "Other ways: copy again",
        (("--failed LIST", "run ! stage verify copy {}",
          "--files-from=LIST", "run rsync -rc {} bundle copy"),),
        TWO, "stage verify copy --report report.json", "", TEXTS, BROKEN, code=1),
    Row("stage/bundle/receipt.py", "stage verify {} names all damage",
        (("stage verify [^ ]+(?= names)", "run ! {}"),),
        TWO, known_damage, "", TEXTS, BROKEN, code=0),
    Row("stage/staging/sources/source.py", "Fetch with the versions of the lock, or make it anew",
        (("stage [a-z]+ m.yaml .*?--update [^ ]+", "run"),), LINES, ANEW, "",
        {"a.csv": ROWS},
        f"{FETCHED}\nsed -i 's/\"pyarrow\": \"[^\"]*\"/\"pyarrow\": \"1.0\"/' m.lock"),
    Row("stage/staging/sources/source.py",
        "{}: use the versions that the lock was made with, or accept",
        (("stage [a-z]+ m.yaml .*?--update [^ ]+", "run"),), LINES, ANEW, "",
        {"a.csv": ROWS}, f"{FETCHED}\nsed -i \"s/$(sha256sum bundle/data/*/a/*/*.parquet | "
        f"cut -c 1-64)/{'0' * 64}/\" m.lock", code=1),
    Row("stage/bundle/bundle.py", "Run `stage fetch` again where it was made, or copy again",
        (("stage fetch", f"run {FETCHED}"),),
        FILE, "stage show bundle", "", TEXTS, f"{FETCHED}\nrm bundle/tagmanifest-sha256.txt"),
    Row(VERIFIER, "This bundle is unfinished: run `stage fetch`",
        (("stage fetch", f"run {FETCHED}"),), FILE, "stage verify bundle", "", TEXTS,
        f"{FETCHED}\nrm bundle/tagmanifest-sha256.txt", code=1),
    Row(VERIFIER, "This is another bundle than",
        (("stage show", "run {} bundle",
          "(?<=bundle id )(?!ab)[0-9a-f]{64}", "instead stage verify bundle --id {}"),),
        FILE, f"stage verify bundle --id {'ab' * 32}", "", TEXTS, FETCHED, code=1),
    Row("stage/convert/text_files.py", "Get the file again, or remove the byte: tr -d",
        ((r"tr -d '\\000' < FILE > NEW", "run", "NEW", "edit assets.a.path: {}"),),
        a(path="FILE", convert="text"), ANEW, "", {"FILE": "a film\n\0another\n"}),
    Row("stage/lock/licences.py", "Take another repository; or, after reading the licence, add",
        (("licence: [a-z]+", "edit assets.a.{}"),
         ("licence: [a-z]+", "edit assets.a.licence: x", "policy: {licences: .*?}", "edit")),
        LINES | {"policy": {"licences": ["mit"]}}, ANEW, "", {"a.csv": ROWS},
        code=3, fill={"...": "x"}),
    Row(MANIFEST, "Remove one of the two. For `runner train`, keep `{}`.",
        (("keep `config`", "remove assets.a.include"),
         ("one of the two", "remove assets.a.config")),
        a(dataset="acme/lines", config="plain", include=["*.csv"]),
        lambda w: Manifest.load(w.path)),
)  # fmt: skip


READ = (
    Row(MANIFEST, "Give it one of: {}.", (("(?<=one of: ).*path", "edit assets.a: {path: a.txt}"),),
        a(), FETCHED, "", TEXTS),
    Row(MANIFEST, "Name at least one, for instance: assets: {bert: {model: google-bert/",
        (("assets: {bert: {model: .*?}}", "edit"),), {"assets": {}},
        lambda w: Manifest.load(w.path)),
    Row("stage/lock/yaml_lines.py", "Give the path of the file.",
        (("the path of the file", "instead stage fetch m.yaml -o new"),),
        FILE, "stage fetch . -o new", "", TEXTS),
    Row("stage/lock/yaml_lines.py", "Write `key: value`.",
        (("(?<=`)key: value", "run sed -i '1,2c name: n' n.yaml"),),
        FILE, "stage fetch n.yaml -o new", "",
        {**TEXTS, "n.yaml": "? [name]\n: n\nformat: 1\nassets: {a: {path: a.txt}}\n"}),
    Row("stage/lock/reader.py", "Or, if you wrote this file yourself, write `format: {}`.",
        (("(?<=`)format: 1", "edit"),), {**FILE, "format": 9}, ANEW, "", TEXTS),
    Row("stage/lock/reader.py", "Write `format: {}`.", (("(?<=`)format: 1", "edit"),),
        {**FILE, "format": "one"}, ANEW, "", TEXTS),
    Row("stage/lock/model.py", "or move it away, and make it again with `stage lock`.",
        (("move it away", "run mv m.lock old.lock", "(?<=`)stage lock", "run {} m.yaml"),),
        FILE, ANEW, "", TEXTS, f"{FETCHED}\nsed -i 9q m.lock"),
    Row("stage/bundle/bundle.py", "Run `stage verify {}` to see all that is damaged.",
        (("stage verify [^` ]+", "run ! {}", "stage fetch", f"run {FETCHED}"),),
        FILE, "stage show bundle", "", TEXTS, f"{FETCHED}\necho >> bundle/stage.lock", code=1),
    Row(SIGNATURE, "If the bundle was made again since, sign again there: stage sign {} --key KEY",
        (("stage sign [^ ]+ --key KEY", "run"),),
        FILE, "stage verify bundle --signers signers", "", TEXTS,
        f"{FETCHED}\n{KEYS}\nstage sign bundle --key KEY\ncp bundle/*.sig .\necho new > a.txt\n"
        f"{FETCHED} --update a\ncp *.sig bundle", code=4),
    Row(APPLY, "Give the folder that `stage patch -o` wrote: stage apply {} PATCH",
        (("stage apply [^ ]+ PATCH", "instead"),), TWO, "stage apply copy bundle", "", TEXTS,
        DAMAGED, fill={"PATCH": "patch"}),
    Row(APPLY, "Copy the patch again: rsync -c.",
        (("rsync -c", "run cp -r patch sent; {} -r sent/ carried"),), TWO,
        "stage apply copy carried", "", TEXTS,
        f"{DAMAGED}\ncp -r patch carried\nsed -i s/one/oh/ $(grep -rl one carried)",
        code=1),
    Row("stage/carry/patch.py", "To carry the new files by hand, with the copy's lock: {} (after",
        (("stage patch [^ ]+ --since [^ ]+ -o [^ ]+", "run",
          "carry", "instead stage apply copy P"),),
        TWO, "stage patch bundle --report report.json -o P", "", TEXTS,
        f"{DAMAGED}\nstage apply copy patch\necho new > a.txt\n{FETCHED} --update a"),
    Row("stage/cli/transfer.py", "stage patch --help", (("stage patch --help", "show"),),
        FILE, "stage patch bundle -o P", "", TEXTS, FETCHED),
    Row("stage/cli/init.py", "stage init --help", (("stage init --help", "show"),),
        {}, "stage init"),
    Row("stage/cli/base.py", "All commands: {} --help",
        (("(?<=All commands: )stage --help", "show"),), {}, "stage fetsh"),
    Row("stage/cli/show.py", "stage show {} --sbom", (("stage show bundle --sbom", "show"),),
        FILE, "stage show bundle --sbom --json", "", TEXTS, FETCHED),
    Row("stage/cli/verify.py", "`stage show` prints the id where the bundle was made; its lock is",
        (("(?<=`)stage show", "run {} bundle",
          "(?<=bundle id )[0-9a-f]{64}", "words --id {}"),
         ("lock is", "words --id m.lock")),
        FILE, "stage verify bundle", "--id here", TEXTS, FETCHED),
    Row("stage/__init__.py", "`stage show BUNDLE` prints it.",
        (("(?<=`)stage show BUNDLE", "run", "(?<=bundle id )[0-9a-f]{64}", "words {}"),),
        FILE, lambda w: verify("bundle", bundle_id=w.tail), "abc", TEXTS, FETCHED),
    Row("stage/__init__.py", "Use one of: {}.", (("(?<=one of: )[a-z]+", "words {}"),),
        FILE, lambda w: verify("bundle", level=w.tail), "every", TEXTS, FETCHED),
)  # fmt: skip


def pip(*lines: str) -> dict[str, Any]:
    """An environment.yml with these lines of pip."""
    return {"channels": ["c"], "dependencies": ["python", {"pip": list(lines)}]}


LINE = "edit dependencies: [python, {pip: [numpy, '{}']}]"
PIP = "stage/environment/spec/environment_yml.py"
YML = "stage/environment/spec/environment_yml.py"


def read(world: World) -> None:
    EnvironmentSpec.load(world.path, world.environ)


def certificates(world: World) -> None:
    """What a download trusts."""
    world.patch.setattr(os, "environ", {**world.environ})
    tls_context()


def served(world: World) -> None:
    """A server of no bundle, at that address."""
    BundleServer(None, shlex.split(world.tail)[1], 0, print).server_close()  # type: ignore[arg-type]


ENVIRONMENTS = (
    Row(PIP, "Known are -r, -c, --index-url, --extra-index-url, --find-links, --no-index, --pre,",
        (("--pre", LINE), ("--no-binary NAME", LINE)), pip("--no-such-option x"), read,
        fill={"NAME": "ftfy"}),
    Row(PIP, "Name those that have no wheel: --no-binary NAME", (("--no-binary NAME", LINE),),
        pip("--no-binary :all:"), read, code=3, fill={"NAME": "ftfy"}),
    Row(PIP, "Name the package and the folder of its wheel: `--find-links FOLDER` and `NAME==",
        (("(?<=`)--find-links FOLDER` and `NAME==VERSION", LINE),), pip("/home/me/mine.whl"), read,
        code=3, fill={"NAME": "mine", "VERSION": "1", "` and `": "', '"}),
    Row(PIP, "Omit quotes and commas: {}", (("(?<=commas: )jsonpickle", LINE),),
        pip("'jsonpickle',"), read),
    Row(PIP, "pip wants two: {}=={}", (("(?<=two: )torch==2.5", LINE),), pip("torch=2.5"), read),
    Row("stage/environment/spec/environment_yml.py", "export {}=..., then again.",
        (("(?<=export )NO_SUCH=[.]{3}", "export"),),
        pip("--index-url https://${NO_SUCH}@a.example"), read, fill={"...": "t"}),
    Row(YML, "For example dependencies: [python=3.11, pip, {pip: [torch]}]",
        ((r"dependencies: \[.*\]", "edit"),), {"channels": ["c"]}, read),
    Row(YML, "Write pip: [torch, transformers]",
        ((r"pip: \[torch, transformers\]", "edit dependencies: [{{}}]"),),
        {"channels": ["c"], "dependencies": [{"pip": "torch"}]}, read),
    Row(KINDS, "It has `channels: [conda-forge]` and `dependencies: [python=3.11]`.",
        ((r"channels: \[conda-forge\]", "edit", r"dependencies: \[python=3.11\]", "edit",
          "a run file", "remove task"),),
        {"channels": [], "task": "masked-lm"}, read),
    Row("stage/lock/requests.py", "Write `url: {}`.",
        (("(?<=`)url: [^`]*", "edit assets.a: {{}}", "names a file", "remove assets.a.path"),),
        a(path="https://a.example/x.txt"), lambda w: Manifest.load(w.path) and None),
    Row(KINDS, "`stage env probe` prints one.", (("stage env probe(?=` prints)", "show"),),
        pip("torch"), lambda w: Profile.load(w.path)),
    Row("stage/environment/spec/profile.py", "`sh env-probe.sh`, run after `module load` or in the",
        (("sh env-probe.sh", "show"),), {}, lambda _: Profile.load(Path("p.yml")), "",
        {"p.yml": "format: 1\nplatform: linux-64\nglibc: '2.28'\nprovides: {numpy: '2'}\n"},
        fill={"env-probe.sh": str(PROBE)}),
    Row("stage/carry/push.py", "Repair this copy, then push again: stage fetch MANIFEST -o {}",
        (("stage fetch MANIFEST -o [^ ]+", "run"),), TWO,
        f"{sys.executable} -m stage push copy ./there", "", TEXTS, BROKEN, code=1,
        fill={"MANIFEST": "m.yaml"}),
    Row("stage/download/http.py", "unset {}; or name the file that the site gives for its proxy.",
        (("(?<=unset )[A-Z_]+", "unset"),), {}, certificates, environ={"CURL_CA_BUNDLE": "none"}),
    Row("stage/serve/server.py", "--host 127.0.0.1", (("--host 127.0.0.1", "words"),),
        {}, served, "--host ''"),
    Row("stage/serve/server.py", "--host takes an address of this machine: 127.0.0.1, or 0.0.0.0",
        (("(?<=: )127.0.0.1", "words --host {}"), (r"0\.0\.0\.0", "words --host {}")),
        {}, served, "--host 192.0.2.7"),
    Row("stage/carry/probe.py", "stage env probe asks this machine.",
        (("stage env probe(?= asks)", "instead"),), {}, "stage env probe --to ./here"),
    Row("stage/environment/check/node.py", "stage show lists what is.",
        (("stage show", "show {} bundle"),), FILE, "stage env check bundle", "", TEXTS, FETCHED),
    Row("stage/carry/patch.py", "Fetch another revision, then: stage patch --since OLD.lock.",
        (("another revision", "run echo {{}} > j/config.json",
          "Fetch", f"run {FETCHED} --update a", "stage patch --since OLD.lock",
          "instead {} bundle -o P"),),
        a(path="j"), "stage patch bundle --report report.json -o P", "", {"j/config.json": "{,"},
        f"{FETCHED}\ncp -r bundle copy\n! stage verify copy --deep --report report.json",
        fill={"OLD.lock": "copy/stage.lock"}),
    Row("stage/bundle/verifier.py", "Where the bundle was made, fetch another revision; or",
        (("at its source", "run echo '{\"a\": 1}' > j/config.json",
          "stage fetch MANIFEST -o BUNDLE --update ASSET", "run {}"),),
        a(path="j"), "stage verify bundle --deep", "", {"j/config.json": "{,"}, FETCHED, code=1,
        fill={"MANIFEST": "m.yaml", "BUNDLE": "bundle", "ASSET": "a"}),
    Row(KINDS, "`stage init NAME...` writes a manifest.",
        (("(?<=`)stage init NAME[.]{3}", "run {} -o made.yaml",
          "writes a manifest", "instead stage fetch made.yaml -o new --no-offline-check"),),
        {}, "stage fetch n.yaml -o new", "", {"n.yaml": "task: masked-lm\n", "a.csv": ROWS},
        fill={"NAME...": "a.csv"}),
    Row("stage/carry/faults.py", "Check the spelling, the VPN, and `Host` in ~/.ssh/config: {ssh}",
        ((r"ssh -G [^ ]+ \| head -n 3", "show"),), FILE, f"{PUSH} no.invalid:x", "", TEXTS, FETCHED,
        code=5),
    Row("stage/carry/faults.py", "Correct that file: {ssh} -G {host}",
        (("(?<=file: )ssh .*? h(?= |$)", "show echo > config; {}"),),
        FILE, f"{PUSH} h:x --ssh 'ssh -F config'", "", {**TEXTS, "config": "Nonsense 1\n"}, FETCHED,
        code=5),
    Row("stage/carry/push.py", "Give a new folder: {}/bundle",
        (("(?<=Give a new folder: )[^ ]+", f"instead {PUSH} {{}}"),),
        FILE, f"{PUSH} ./there", "", {**TEXTS, "there/notes": "mine"}, FETCHED),
)  # fmt: skip


@pytest.mark.parametrize("row", (*MANIFESTS, *BUNDLES, *STORIES, *READ, *ENVIRONMENTS), ids=str)
def test_what_a_remedy_of_stage_says_leads_on(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    obey(row, monkeypatch)
