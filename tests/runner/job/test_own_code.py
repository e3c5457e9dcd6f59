"""What a person's own code asks for, found by reading it: each fault, and what is no fault."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import yaml

from runner.job import reached_code
from runner.job.findings import Finding
from runner.job.own_code import CommandJob, JobPython, findings
from runner.job.reached_code import OwnCode, reach
from stage.lock.manifest import Manifest
from stage.serve.catalogue import Catalogue, ServedRepository
from tests.remedies.obeyed import in_it, obeys

OURS = "runner/job/own_code.py"
NOT_HERE = JobPython("the environment `train-env`", None, ("torch", "opencv-python"))


class Project:
    """A folder with files; each `check` is what is found for a command."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.served = {("models", "org/here"), ("models", "gpt2"), ("datasets", "org/rows")}
        self.python = JobPython("this Python")
        self.gpus = 4
        self.is_here = False
        self.ignored = set[str]()
        self.own = list[str]()

    def write(self, path: str, text: str) -> Project:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return self

    def code(self, command: str, folder: str = "") -> OwnCode:
        paths = {p.relative_to(self.root).as_posix() for p in self.root.rglob("*") if p.is_file()}
        return OwnCode(self.root, frozenset(paths - self.ignored), tuple(command.split()), folder)

    def check(self, command: str = "python train.py", folder: str = "") -> list[Finding]:
        names = self.served | {("models", name) for name in self.own}
        served = Catalogue({key: ServedRepository(key[0], key[1], ()) for key in names})
        job = CommandJob(self.python, served, self.gpus, self.is_here)
        return list(findings(self.code(command, folder), job))

    def only(self, command: str = "python train.py", folder: str = "") -> Finding:
        (found,) = self.check(command, folder)
        return found


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project").write("train.py", "import json\n")


# Syntax.


def test_a_syntax_error_in_a_file_that_is_imported(project: Project) -> None:
    project.write("train.py", "from lib import data\n").write("lib/data.py", "x = 1\ndef f(:\n")
    found = project.only()
    assert found.level == "error"
    assert found.message.startswith("lib/data.py:2: Python 3.")
    assert list(project.root.rglob("__pycache__")) == []


def test_a_syntax_error_in_a_file_that_nothing_imports_is_none(project: Project) -> None:
    assert project.write("old.py", "print 'a'\n").check() == []


def test_a_syntax_error_where_the_python_of_the_job_is_not_here(project: Project) -> None:
    project.python = NOT_HERE
    assert project.write("train.py", "def f(:\n").only().level == "error"


def test_the_python_of_the_job_reads_it_and_not_this_one(project: Project, tmp_path: Path) -> None:
    """A Python that is older than the code; here one that knows no `match`."""
    old = tmp_path / "old"
    old.write_text(
        f"#!{sys.executable}\nimport builtins, sys\nkept = builtins.compile\n"
        "def compile(text, *more, **named):\n"
        "    if b'match' in text: raise SyntaxError('invalid syntax', ('', 2, 1, ''))\n"
        "    return kept(text, *more, **named)\n"
        "builtins.compile = compile\nsys.path.insert(0, '')\nexec(sys.argv[-1])\n",
        encoding="utf-8",
    )
    old.chmod(0o755)
    project.python = JobPython("an old Python", (str(old),))
    project.write("train.py", "import sys\nmatch sys.argv:\n    case _:\n        pass\n")
    found = project.only()
    assert found.message.startswith("train.py:2: Python 3.")
    assert f"python={sys.version_info[0]}.{sys.version_info[1]}" in found.remedy


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"x = '\0'\n",
        b"# coding: nonsense\n",
        b"x = " + b"(" * 5000,
        b"\xef\xbb\xbfx = 1\n",
    ],
    ids=["utf-16", "null", "coding", "deep", "bom"],
)
def test_no_file_ends_the_reading(project: Project, content: bytes) -> None:
    (project.root / "train.py").write_bytes(content)
    assert all(found.level == "error" for found in project.check())


def test_a_deep_expression_ends_the_reading_of_its_file_alone(project: Project) -> None:
    project.write("train.py", f"import nothing_such\nx = {'+'.join(['1'] * 990)}\n")
    assert "`nothing_such`" in project.only().message


def test_a_loop_of_links_is_no_fault(project: Project) -> None:
    project.write("train.py", "import loop\n")
    (project.root / "loop.py").symlink_to("loop.py")
    code = project.code("python train.py")
    assert reach(OwnCode(code.root, code.paths | {"loop.py"}, code.words)).sure["loop.py"] == 2


# Imports.


def test_a_package_that_the_python_of_the_job_does_not_have(project: Project) -> None:
    project.write("train.py", "import json\nfrom nothing_such.part import x\n")
    found = project.only()
    assert found.level == "error"
    assert found.message == (
        "train.py:2: imports `nothing_such`, and this Python does not have it."
    )
    assert found.remedy.startswith("Correct the name, or bring the package to that Python")


def test_a_package_has_another_name_for_pip(project: Project) -> None:
    project.python = JobPython("the environment `e`", None, ("torch",), "add {} to environment.yml")
    assert project.write("train.py", "import cv2\n").only().remedy == (
        "add opencv-python to environment.yml"
    )


def test_packages_known_by_name_alone_give_a_warning(project: Project) -> None:
    names = ("torch", "opencv-python-headless", "faiss-gpu", "PyYAML")
    project.python = JobPython("the environment `train-env`", None, names)
    project.write("train.py", "import cv2, torch, json, faiss, yaml\nimport trl\n")
    assert project.only().level == "warning"


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import absent\nexcept ImportError:\n    absent = None\n",
        "try:\n    import absent\nexcept:\n    pass\n",
        "try:\n    import absent\nexcept (ValueError, ModuleNotFoundError):\n    pass\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import absent\n",
        "import sys\nif sys.platform == 'win32':\n    import absent\n",
        "def is_absent_available(): return False\nif is_absent_available():\n    import absent\n",
        "def not_called():\n    import absent\n",
        "class A:\n    def f(self):\n        import absent\n",
        "import importlib\nimportlib.import_module('absent')\n",
        "from contextlib import suppress\nwith suppress(ImportError):\n    import absent\n",
        "from compiled import _C\nimport compiled._C\n",
        "import a_namespace.part\n",
        "from __future__ import annotations\n",
    ],
)
def test_an_import_that_may_never_run_is_no_fault(project: Project, text: str) -> None:
    project.write("a_namespace/part/x.py", "")
    project.write("compiled/__init__.py", "").write("compiled/_C.abi3.so", "")
    assert project.write("train.py", text).check() == []


def test_an_import_in_a_function_that_the_script_calls(project: Project) -> None:
    text = "def main():\n    import absent\n\nif __name__ == '__main__':\n    main()\n"
    assert project.write("train.py", text).only().level == "warning"


def test_the_main_block_of_a_file_that_is_imported_does_not_run(project: Project) -> None:
    project.write("train.py", "import helper\n")
    assert (
        project.write("helper.py", "if __name__ == '__main__':\n    import absent\n").check() == []
    )


@pytest.mark.parametrize(
    ("command", "folder", "text"),
    [
        ("python src/run.py", "", "import beside"),
        ("torchrun --nproc_per_node 2 src/run.py", "", "import beside"),
        ("python run.py", "src", "import beside"),
        ("python -m src.run", "", "from src import beside"),
        ("torchrun -m src.run", "", "from . import beside"),
        ("python -m torch.distributed.run src/run.py", "", "import beside"),
        ("PYTHONPATH=lib python src/run.py", "", "import far"),
        ("env PYTHONPATH=lib python src/run.py", "", "import far"),
        ("deepspeed src/run.py", "", "from lib import far"),
        ("srun -m block python src/run.py", "", "import beside"),
        ("python src/run.py", "", "import sys\nsys.path.append('lib')\nimport far"),
        (
            "python src/run.py",
            "",
            "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))\n"
            "from lib import far",
        ),
        (
            "python src/run.py",
            "",
            "import sys\nfrom pathlib import Path\n"
            "sys.path.append(str(Path(__file__).parent.parent / 'lib'))\nimport far",
        ),
    ],
)
def test_local_modules_are_found_as_python_finds_them(
    project: Project, command: str, folder: str, text: str
) -> None:
    project.write("src/run.py", f"{text}\n").write("src/beside.py", "").write("lib/far.py", "")
    assert project.check(command, folder) == []
    reached = reach(project.code(command, folder)).sure
    assert reached.keys() & {"src/beside.py", "lib/far.py"}


def test_a_path_that_a_later_file_adds_counts_for_the_first(project: Project) -> None:
    project.write("train.py", "import paths\nimport far\n").write("lib/far.py", "")
    assert project.write("paths.py", "import sys\nsys.path.append('lib')\n").check() == []


@obeys(OURS, "In the run file, write include: [{}]; or: git add -f {}")
def test_a_module_that_git_ignores(project: Project) -> None:
    project.write("train.py", "import secret_part\n").write("secret_part.py", "")
    project.ignored = {"secret_part.py"}
    found = project.only()
    assert found.level == "error"
    assert "does not travel: git ignores it" in found.message
    listed = yaml.safe_load(in_it(found.remedy, r"include: \[.*?\]"))["include"]
    project.ignored -= set(listed)
    assert project.check() == []


def test_a_part_of_a_package_that_is_not_there(project: Project) -> None:
    project.write("train.py", "from lib.missing import x\n").write("lib/__init__.py", "")
    assert project.only().message == (
        "train.py:1: imports `lib.missing`, and the project has no such module."
    )


@obeys(OURS, "Begin the command with PYTHONPATH={}; or stage it as a wheel.")
def test_a_package_below_src_that_is_not_installed(project: Project) -> None:
    project.write("train.py", "import mine.part\n").write("src/mine/__init__.py", "")
    project.write("src/mine/part.py", "")
    found = project.only()
    assert found.level == "error"
    assert "in the folder `src`, where Python does not look" in found.message
    assert project.check(f"{in_it(found.remedy, 'PYTHONPATH=src')} python train.py") == []


def test_a_package_of_the_project_that_is_installed(project: Project) -> None:
    """`pip install -e .` on the laptop, a wheel in the environment: what is found there counts."""
    project.write("train.py", "import yaml\n").write("src/yaml/__init__.py", "def f(:\n")
    assert project.check() == []


def test_a_module_that_the_command_starts(project: Project) -> None:
    assert project.check("python -m json.tool") == []
    assert "`nothing_such`" in project.only("python -m nothing_such.run").message


def test_the_python_scripts_of_a_shell_script(project: Project) -> None:
    project.write("run.sh", "#!/bin/bash\n# python old.py\npython train.py \\\n  --x 1\n")
    project.write("train.py", "import absent\n").write("old.py", "import gone\n")
    assert "`absent`" in project.only("bash run.sh").message


def test_the_python_scripts_in_a_line_for_a_shell(project: Project) -> None:
    project.write("train.py", "import absent\n")
    code = project.code("bash -c")
    text = "cd . && python train.py"
    reached = reach(OwnCode(code.root, code.paths, ("bash", "-lc", text)))
    assert reached.scripts == ["train.py"]


def test_the_number_of_files_is_bounded(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reached_code, "MAX_FILES", 3)
    monkeypatch.setattr("runner.job.own_code.MAX_FILES", 3)
    project.write("train.py", "import a, b, c, d\n")
    for name in "abcd":
        project.write(f"{name}.py", "")
    assert project.only().level == "note"


# Files that the command names.


@pytest.mark.parametrize("script", ["/opt/tools/run.py", "$HOME/run.py"])
def test_a_script_that_is_elsewhere(project: Project, script: str) -> None:
    assert project.check(f"python {script}") == []


def test_the_script_has_another_name(project: Project) -> None:
    found = project.only("python trian.py")
    assert found.level == "error"
    assert found.remedy.startswith("Did you mean `train.py`?")


@obeys(OURS, "In the run file, write include: [{}]; what is large is an asset (`path:` in the")
def test_a_config_that_does_not_travel(project: Project) -> None:
    project.write("conf/x.yaml", "lr: 1\n").ignored = {"conf/x.yaml"}
    found = project.only("python train.py --config conf/x.yaml")
    assert found.level == "error"
    assert "does not travel" in found.message
    listed = yaml.safe_load(in_it(found.remedy, r"include: \[.*?\]"))["include"]
    project.ignored -= set(listed)
    assert project.check("python train.py --config conf/x.yaml") == []


@pytest.mark.parametrize(
    "words",
    ["--config-file x.yaml", "-c x.yaml", "--deepspeed ds.json", "config=c/x.yaml", "x.yaml"],
)
def test_a_config_that_does_not_exist(project: Project, words: str) -> None:
    assert project.only(f"python train.py {words}").level == "error"


@pytest.mark.parametrize("words", ["--train_file rows.jsonl", "--data_path data/rows.json"])
def test_a_data_file_that_does_not_exist(project: Project, words: str) -> None:
    assert project.only(f"python train.py {words}").level == "warning"


@pytest.mark.parametrize(
    "words",
    [
        "--output_dir out/run",
        "--log-file x.json",
        "--save_path a/b.yaml",
        "--resume_from_checkpoint out/checkpoint-10",
        "--results results.csv",
        "--run_name a/b",
        "--config $CONFIG/x.yaml",
        "--data https://host/x.json",
        "--train-data /cluster/{0..9}.json",
        "--data inner.yaml",  # as yolov5 does: the script looks in `data`
        "train",
        "--config conf",
        "--data_dir data",
        "--input-model org/here-2.5",  # a dot, and no suffix
    ],
)
def test_what_is_written_or_elsewhere_is_no_missing_file(project: Project, words: str) -> None:
    project.served |= {("models", "org/here-2.5")}
    project.write("data/inner.yaml", "a: 1\n").write("conf/x.yaml", "b: 1\n")
    project.write("out/run/x", "").write("train/x", "")
    project.ignored = {"out/run/x", "train/x"}
    assert project.check(f"python train.py {words}") == []


def test_a_folder_of_data_that_git_ignores(project: Project) -> None:
    project.write("my/rows/x.parquet", "").ignored = {"my/rows/x.parquet"}
    assert "does not travel" in project.only("python train.py --data_dir my/rows").message


# Repositories of a Hub.

LOADS = "from transformers import AutoModel\nfrom datasets import load_dataset\n"


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("AutoModel.from_pretrained('org/other-1.5')", "model", "org/other-1.5"),
        ("AutoModel.from_pretrained('bert-base-cased')", "model", "bert-base-cased"),
        ("NAME = 'org/x.y'\nAutoModel.from_pretrained(NAME)", "model", "org/x.y"),
        ("load_dataset('org/text', 'plain')", "dataset", "org/text"),
        ("load_dataset(path='glue')", "dataset", "glue"),
        ("import evaluate\nevaluate.load('accuracy')", "metric", "accuracy"),
        ("SFTTrainer(model='org/small')", "model", "org/small"),
        ("pipeline('text-generation', model='org/small')", "model", "org/small"),
        ("snapshot_download('org/raw', repo_type='dataset')", "dataset", "org/raw"),
        ("hf_hub_download(repo_id='org/raw', filename='x')", "model", "org/raw"),
        (
            "p = ArgumentParser()\np.add_argument('--model_name_or_path', default='org/mod')",
            "model",
            "org/mod",
        ),
        ("class A:\n    model_name: str = field(default='org/field')", "model", "org/field"),
        (
            "class A:\n    def __init__(self):\n        AutoModel.from_pretrained('org/mod')",
            "model",
            "org/mod",
        ),
    ],
)
def test_a_repository_in_the_code(
    project: Project, tmp_path: Path, text: str, kind: str, name: str
) -> None:
    project.write("train.py", f"{text}\n")
    (found,) = [f for f in project.check() if "imports" not in f.message]
    assert (found.level, f"asks for the {kind} {name}: not in" in found.message) == (
        "warning",
        True,
    )
    assert found.message.startswith("train.py:")
    manifest = tmp_path / "manifest.yaml"
    lines = in_it(found.remedy, r"(?s)  \S+:\n    .*")
    manifest.write_text(f"format: 1\nname: mine\nassets:\n{lines}\n", encoding="utf-8")
    (asset,) = Manifest.load(manifest).requests.values()
    assert asset.location == name


@pytest.mark.parametrize(
    "text",
    [
        "AutoModel.from_pretrained('org/here')",
        "AutoModel.from_pretrained('gpt2')",
        "load_dataset('org/rows')",
        "load_dataset('json', data_files='x.json')",
        "AutoModel.from_pretrained('./local')",
        "AutoModel.from_pretrained('weights/mine')",
        "AutoModel.from_pretrained('output/last')",
        "AutoModel.from_pretrained(args.model)",
        "if args.small:\n    AutoModel.from_pretrained('org/small')",
        "try:\n    AutoModel.from_pretrained('org/small')\nexcept Exception:\n    pass",
        "'''AutoModel.from_pretrained('org/small')'''",
        "parser.add_argument('--hub_model_id', default='me/mine')",
        "parser.add_argument('--model', default='DiT-XL/2')",
        "parser.add_argument('--model', choices=['org/one', 'org/two'])",
        "class A:\n    metadata_dataset: str = 'org/evals'",
        "timm.create_model('vit_base')",
    ],
)
def test_what_is_no_repository_that_is_missing(project: Project, text: str) -> None:
    project.write("weights/mine/config.json", "{}").write("train.py", f"{text}\n")
    assert project.check() == []


def test_a_class_that_nothing_calls_is_not_read_for_names(project: Project) -> None:
    """Of FastChat: many adapters, each with a model of its own; the script takes one."""
    load = "    def load(self):\n        return AutoModel.from_pretrained('org/other')\n"
    project.write("zoo.py", f"class Adapter:\n{load}\nregister(Adapter)\n")
    assert project.write("train.py", "import zoo\n").check() == []
    project.write("train.py", "import zoo\nzoo.Adapter()\n")
    assert "model org/other:" in project.only().message


def test_a_word_of_the_command_wins_over_a_default(project: Project) -> None:
    text = "parser.add_argument('--model_name_or_path', default='org/default')\n"
    project.write("train.py", text)
    assert "org/default" in project.only().message
    assert project.check("python train.py --model_name_or_path org/here") == []
    assert project.check("python train.py --model-name-or-path=org/here") == []
    project.write("x.yaml", "model_name_or_path: org/here\n")
    assert project.check("python train.py --config x.yaml") == []
    project.write("run.sh", "python train.py --model_name_or_path $MODEL\n")
    assert project.check("bash run.sh") == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.yaml", "a: 1\nmodel_name_or_path: org/other\n"),
        ("x.json", '{"a": 1,\n"model": "org/other"}'),
        ("x.toml", 'a = 1\nbase_model = "org/other"\n'),
        ("x.yml", "a: 1\nmodel: {name: org/other}\n"),
    ],
)
def test_a_repository_in_a_config_of_the_command(project: Project, name: str, text: str) -> None:
    found = project.write(name, text).only(f"llamafactory-cli train {name}")
    assert found.message.startswith(f"{name}:2: asks for the model org/other: not in")


@pytest.mark.parametrize(
    "text", ["dataset_mixer:\n  org/other: 0.5\n", "datasets:\n- path: org/other\n  type: alpaca\n"]
)
def test_datasets_in_a_config(project: Project, text: str) -> None:
    assert "dataset org/other" in project.write("x.yaml", text).only("trl sft x.yaml").message


@pytest.mark.parametrize(
    "text", ["dataset: alpaca_demo\n", "{", "- &a [*a]\n", "\t", "model: vit\n"]
)
def test_a_config_without_repositories(project: Project, text: str) -> None:
    assert project.write("x.yaml", text).check("llamafactory-cli train x.yaml") == []


def test_a_repository_in_the_words_of_the_command(project: Project) -> None:
    project.write("train.py", "load_dataset(args.dataset_name)\n")
    words = "--model_name_or_path bert-base-cased --dataset_name glue --tokenizer_name=org/here"
    messages = [found.message for found in project.check(f"python train.py {words}")]
    assert messages == [
        "the command: asks for the dataset glue: not in this bundle.",
        "the command: asks for the model bert-base-cased: not in this bundle.",
    ]


@pytest.mark.parametrize("words", ["--model resnet50", "--dataset cora", "--dataset_name cifar10"])
def test_a_name_that_the_script_itself_knows(project: Project, words: str) -> None:
    assert project.check(f"python train.py {words}") == []


# Paths of one machine.


@obeys(OURS, "In the manifest, below `assets:`, write {}: {path: {}}, and read it from")
def test_a_path_of_this_laptop(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows").mkdir()
    found = project.only("python train.py --data_dir ~/rows")
    assert "a path of this machine" in found.message
    line = in_it(found.remedy, r"[\w-]+: \{.*?\}")
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(f"format: 1\nname: mine\nassets:\n  {line}\n", encoding="utf-8")
    assert [*Manifest.load(manifest).requests] == ["rows"]
    project.is_here = True
    assert project.check("python train.py --data_dir ~/rows") == []


def test_a_path_that_is_here_alone_is_named_wherever_it_is(
    project: Project, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").touch()
    found = project.only(f"python train.py --data {tmp_path}/rows.csv")
    assert f"names {tmp_path}/rows.csv, a path of this machine" in found.message
    assert project.check("python train.py --lib /usr/lib --out /scratch/me/new") == []


@pytest.mark.parametrize(
    "text",
    [
        "p = '/home/me/data'",
        "p = '/Users/me/data'",
        "p = 'C:\\\\data\\\\x'",
        "parser.add_argument('--data', default='/home/me/x')",
    ],
)
def test_a_path_of_another_machine_in_the_code(project: Project, text: str) -> None:
    assert "is not on this machine" in project.write("train.py", f"{text}\n").only().message


@pytest.mark.parametrize(
    "text",
    [
        "# /home/me/data",
        "'''/home/me/data'''",
        "p = 'as in /home/me/data'",
        "if x == '/home/me/data': pass",
        "if debug:\n    p = '/home/me/data'",
        "p = '/data/imagenet'",
        "p = os.path.expanduser('~/.cache/mine')",
        "p = f'/home/{user}/data'",
        "parser.add_argument('--given', default='/home/me/x')",
    ],
)
def test_what_is_no_path_of_a_laptop(project: Project, text: str) -> None:
    project.write("train.py", f"{text}\n")
    assert project.check("python train.py --given data/x") == []


def test_a_path_of_the_cluster_typed_on_the_laptop(project: Project) -> None:
    assert project.check("python train.py --data_dir /home/me_there/data") == []


# What fights with the job.


@pytest.mark.parametrize(
    "text",
    [
        "os.environ['HF_HUB_OFFLINE'] = '1'",
        "os.environ['HF_ENDPOINT'] = 'https://mirror.example'",
        "os.environ.setdefault('TRANSFORMERS_OFFLINE', 'true')",
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0'",
        "from os import environ\nenviron['HF_DATASETS_OFFLINE'] = '1'",
    ],
)
def test_variables_that_the_code_sets(project: Project, text: str) -> None:
    found = project.write("train.py", f"import os\n{text}\n").only()
    assert (found.level, "sets" in found.message) == ("warning", True)


@pytest.mark.parametrize(
    "text",
    [
        "os.environ['HF_HUB_OFFLINE'] = '0'",
        "os.environ['HF_ENDPOINT'] = address",
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0,1,2,3'",
        "os.environ['CUDA_VISIBLE_DEVICES'] = str(rank)",
        "if args.cpu:\n    os.environ['CUDA_VISIBLE_DEVICES'] = '-1'",
        "os.environ['TOKENIZERS_PARALLELISM'] = 'false'",
        "os.environ['MINE'] = str(x)\nos.environ['MINE']",
        "os.environ['MINE']",
    ],
)
def test_variables_that_are_no_fault(project: Project, text: str) -> None:
    assert project.write("train.py", f"import os\n{text}\n").check() == []


def test_offline_variables_before_the_program_do_no_harm(project: Project) -> None:
    assert project.check("HF_HUB_OFFLINE=1 HF_ENDPOINT=https://a.b python train.py") == []


def test_gpus_that_the_command_hides(project: Project) -> None:
    command = "CUDA_VISIBLE_DEVICES=0 python train.py"
    assert "4 GPUs per node" in project.only(command).message
    project.gpus = 1
    assert project.check(command) == []


@obeys(OURS, "{}; or without it: --report_to none")
def test_a_logger_that_is_not_installed(project: Project) -> None:
    project.python = NOT_HERE
    project.write("train.py", "TrainingArguments(report_to=['wandb'])\n")
    found = project.only()
    assert "reports to wandb" in found.message
    assert project.check(f"python train.py {in_it(found.remedy, '--report_to none')}") == []
    assert "wandb" in project.only("python train.py --report_to wandb").message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TrainingArguments(push_to_hub=True)", ""),
        ("trainer.push_to_hub()", ""),
        ("from huggingface_hub import login\nlogin(token='x')", ""),
        ("", " --push_to_hub"),
        ("", " --push_to_hub True"),
    ],
)
def test_uploads(project: Project, text: str, words: str) -> None:
    project.write("train.py", f"{text}\n")
    (found,) = [f for f in project.check(f"python train.py{words}") if "imports" not in f.message]
    assert "needs the Hub itself" in found.message


@pytest.mark.parametrize(
    "text",
    [
        "if args.push_to_hub:\n    trainer.push_to_hub()",
        "wandb.login()",
        "TrainingArguments(push_to_hub=False, report_to='none')",
        "TrainingArguments(push_to_hub=args.push)",
        "try:\n    model.push_to_hub('x')\nexcept Exception:\n    pass",
    ],
)
def test_uploads_that_may_not_happen(project: Project, text: str) -> None:
    assert project.write("train.py", f"{text}\n").check() == []


# The script's own options.

PARSER = "import argparse\nparser = argparse.ArgumentParser()\n"


def test_an_option_that_the_script_does_not_know(project: Project) -> None:
    text = f"{PARSER}parser.add_argument('--learning-rate', '-l')\nargs = parser.parse_args()\n"
    project.write("train.py", text)
    found = project.only("torchrun --nproc_per_node 4 train.py --lerning-rate=1")
    assert found.level == "error"
    assert found.remedy.startswith("Did you mean `--learning-rate`?")
    assert project.check("python train.py --learning-rate 1 -l 2 --learn 3 --help") == []


@pytest.mark.parametrize(
    "text",
    [
        f"{PARSER}args, rest = parser.parse_known_args()",
        f"{PARSER}deepspeed_words(parser)\nparser.parse_args()",
        f"{PARSER}for n in names:\n    parser.add_argument(n)\nparser.parse_args()",
        "import argparse\nparser = argparse.ArgumentParser(parents=[base()])\nparser.parse_args()",
        f"{PARSER}parser.add_subparsers()\nparser.parse_args()",
        f"{PARSER}parser.parse_args(words)",
        "parser = HfArgumentParser(Words)\nparser.parse_args_into_dataclasses()",
        "import click",
        "from here import parser\nparser.parse_args()",
    ],
)
def test_options_that_the_script_may_know(project: Project, text: str) -> None:
    project.write("train.py", f"{text}\n").write("here.py", "")
    found = project.check("python train.py --other 1")
    assert [one for one in found if "option" in one.message] == []


def test_the_question_to_the_python_of_the_job_is_for_any_python() -> None:
    from runner.job.own_code import _ASK

    ast.parse(_ASK, feature_version=(3, 6))


def test_an_option_is_found_beside_a_call_with_a_mapping(project: Project) -> None:
    """Most loops have `model(**batch)`: it says nothing about the options."""
    project.write(
        "train.py",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--steps')\n"
        "options = parser.parse_args()\ndef step(model, batch):\n    return model(**batch)\n",
    )
    found = project.only("python train.py --stesp 3")
    assert "--stesp" in found.message and "Did you mean `--steps`?" in found.remedy


@pytest.mark.parametrize("path", ["../laptop/tiny", "../../rows.txt", "./tiny"])
def test_a_path_that_leads_out_of_the_project_or_to_nothing(project: Project, path: str) -> None:
    found = project.only(f"python train.py --model {path}")
    assert found.level == "warning" and path.strip("./") in found.message
    assert "include" not in found.remedy


def test_an_own_name_is_no_repository_of_a_hub(project: Project) -> None:
    project.own = ["bundle/tiny-qwen"]
    command = "python train.py --model_name_or_path"
    assert "Did you mean `bundle/tiny-qwen`?" in project.only(f"{command} bundle/tiny-qwn").remedy
    assert "it is here as `bundle/tiny-qwen`" in project.only(f"{command} tiny-qwen").remedy
