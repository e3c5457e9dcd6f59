"""The run file: mistakes are reported with file and line, and every default has a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from runner.from_stage import UsageError

REPOSITORY = Path(__file__).parents[3]
SMALLEST = """\
format: 1
task: masked-lm
model: {asset: bert}
dataset: {asset: wikitext}
"""


def load(folder: Path, text: str = SMALLEST, *overrides: str, name: str = "mine") -> RunConfig:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return RunConfig.load(path, overrides)


def refused(folder: Path, text: str = SMALLEST, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(folder, text, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("line", "unknown", "nearest"),
    [
        ("epoch: 3", "epoch", "epochs"),
        ("batch: {gobal: 8}", "gobal", "global"),
        ("optimizer: {rate: 1e-4, lr: 1e-4}", "rate", ""),
        ("engine: {zeros: 2}", "zeros", "zero"),
        ("slurm: {partitions: gpu}", "partitions", "partition"),
    ],
)
def test_an_unknown_key_is_reported_with_its_line_and_the_nearest(
    tmp_path: Path, line: str, unknown: str, nearest: str
) -> None:
    said = refused(tmp_path, f"{SMALLEST}{line}\n")
    assert f"mine.yaml:5: unknown key `{unknown}`" in said
    assert f"Did you mean `{nearest}`?" in said if nearest else "Valid keys:" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "sequence_length: long",
            "`sequence_length` must be a whole number or `auto`, found `long`",
        ),
        ("sequence_length: 4", "`sequence_length` must be at least 8, found `4`"),
        ("batch: {global: 2.5}", "`batch.global` must be a whole number or `auto`, found `2.5`"),
        ("batch: {micro: 0}", "`batch.micro` must be at least 1, found `0`"),
        ("batch: {micro: true}", "`batch.micro` must be a whole number or `auto`, found `true`"),
        ("batch: 8", "`batch` must be `key: value` lines, found `8`"),
        ("batch:", "`batch` must be `key: value` lines, found nothing"),
        ("optimizer: {lr: 0}", "`optimizer.lr` must be above 0"),
        ("optimizer: {lr: .inf}", "`optimizer.lr` must be a number, found `.inf`"),
        ("optimizer: {betas: [0.9]}", "`optimizer.betas` must be a list of 2, each a number"),
        ("optimizer: {betas: [0.9, 1]}", "`optimizer.betas` must be below 1"),
        ("epochs: .inf", "`epochs` must be a number or null, found `.inf`"),
        ("seed: 100000000000000000000", "`seed` must be below"),
        ("precision: fp8", "`precision` must be `auto` | `bf16` | `fp16` | `fp32`, found `fp8`"),
        ("precision:", "found nothing"),
        ("engine: {zero: 4}", "`engine.zero` must be `auto` | `0` | `1` | `2` | `3`, found `4`"),
        ("engine: {zero: true}", "found `true`"),
        ("dataset2: {}", "unknown key `dataset2`"),
        ("slurm: {modules: cuda}", "`slurm.modules` must be a list of text"),
        ("slurm: {options: {mem: [1]}}", "`slurm.options` must be `key: value` lines"),
        ("name: a/b", "cannot be the name of the run folder"),
        ("name: ..", "cannot be the name of the run folder"),
        (
            f"name: {'a' * 300}",
            "characters: the run folder gets this name, so it must be shorter",
        ),
        ("schedule: {warmup: 1.5}", "neither a share below 1 nor whole steps"),
        ("epochs:", "neither `epochs` nor `steps`"),
        ("task: causal-lm", "`task` is written twice"),
        ("checkpoint: {every: 0}", "`checkpoint.every` must be at least 1"),
        ("steps: '64'", "(remove the quotes)"),
        ("lora: {targets: query}", 'Write a list: ["query"]'),
        ("environment: train-env", "`environment`"),
        (f"bundle: {{id: {'ab' * 6}}}", "64 hex digits"),
        (f"bundle: {{id: {'AB' * 32}}}", "64 hex digits"),
        (f"bundle: {{id: 'sha256:{'ab' * 32}'}}", "64 hex digits"),
        ("environment: {asset: e, node_local: maybe}", "`environment.node_local`"),
        # Each alone could be: they do not go together.
        (
            "engine: {name: fsdp, zero: 2}",
            "`engine.zero` is only for engine.name: deepspeed; it is fsdp here",
        ),
        (
            "engine: {name: ddp, config: ds.json}",
            "`engine.config` is only for engine.name: deepspeed; it is ddp here",
        ),
        (
            "engine: {zero: 2, wrap: {min_params: 5}}",
            "`engine.wrap` is only for engine.name: fsdp; it is deepspeed here",
        ),
        ("engine: {name: ddp, sharding: full}", "`engine.sharding` is only for engine.name: fsdp"),
        (
            "engine: {name: ddp, offload: cpu}",
            "`engine.offload` is only for engine.name: deepspeed or fsdp; it is ddp here",
        ),
        ("engine: {name: fsdp, offload: nvme}", "fsdp does not do offload: nvme"),
        ("engine: {offload: nvme}", "`offload: nvme` and `nvme_path`"),
        ("engine: {nvme_path: /scratch}", "`offload: nvme` and `nvme_path`"),
        ("engine: {zero: 0, offload: cpu}", "ZeRO stage 0 offloads nothing"),
        (
            "engine: {name: fsdp, wrap: {layers: Block}}",
            "`engine.wrap` must be the class of a layer or a number of parameters, found `{",
        ),
        (
            "engine: {name: fsdp, wrap: {min_params: many}}",
            "`engine.wrap` must be the class of a layer or a number of parameters, found `{",
        ),
        (
            "engine: {name: fsdp, wrap: {}}",
            "`engine.wrap` must be the class of a layer or a number of parameters, found `{",
        ),
        (
            "optimizer: {name: adafactor}",
            "adafactor does not work on weights that deepspeed partitions",
        ),
        ("optimizer: {name: adamw_8bit}", "Set engine.name: ddp, or optimizer.name: adamw"),
        ("schedule: {decay: 0.5}", "only for schedule.name: wsd; it is cosine here"),
        ("schedule: {name: wsd, decay: 1.5}", "neither a share below 1 nor whole steps"),
        ("checkpoint: {every: often}", "is neither steps nor a time nor `epoch`, found `often`"),
        (
            "optimizer: {name: sgd, betas: [0.9, 0.95]}",
            "`optimizer.betas` is only for optimizer.name: adamw or",
        ),
        (
            "optimizer: {momentum: 0.5}",
            "`optimizer.momentum` is only for optimizer.name: sgd; it is adamw here",
        ),
        ("label_smoothing: 1.0", "`label_smoothing` must be below 1"),
        ("checkpoint: {every: 0 min}", "is neither steps nor a time nor `epoch`, found `0 min`"),
    ],
)
def test_a_value_that_cannot_be_is_reported_with_its_line(
    tmp_path: Path, line: str, said: str
) -> None:
    found = refused(tmp_path, f"{SMALLEST}{line}\n")
    assert said in found
    assert found.startswith("mine.yaml:5:")


@pytest.mark.parametrize(
    ("line", "instead", "said"),
    [
        (4, "dataset: {asset: d, limit: {test: 5}}", "cannot limit `test`"),
        (4, "dataset: {asset: d, limit: {train: 0}}", "at least 1 row"),
        (4, "dataset: {asset: d, limit: {train: many}}", "`dataset.limit` must be `key: value`"),
        (4, "dataset: {asset: d, validation: 0%}", "must be between 0 % and 100 %, found `0%`"),
        (4, "dataset: {asset: d, validation: 100%}", "must be between 0 % and 100 %, found `100%`"),
        (
            4,
            "dataset: {asset: d, validation: five%}",
            "must be between 0 % and 100 %, found `five%`",
        ),
        (4, "dataset: {asset: d, validation: 0.05}", "must be text or null, found `0.05`"),
        *((4, f"dataset: {{asset: d, validation: {n}}}", "validation: 5%") for n in ("0%", 0.05)),
        (3, "model: {init: scratch}", "`model.asset` is missing"),
        (3, "lora: {}\nmodel: {asset: bert, init: scratch}", "has random weights"),
        (1, "format: 2", "newer airlift"),
        (2, "task: masked-ml", "Did you mean `masked-lm`?"),
        (2, "task: my.Task", "command: python"),
    ],
)
def test_a_line_that_says_what_cannot_be_is_refused(
    tmp_path: Path, line: int, instead: str, said: str
) -> None:
    lines = SMALLEST.splitlines()
    lines[line - 1] = instead
    found = refused(tmp_path, "\n".join(lines))
    assert found.startswith(f"mine.yaml:{line}: ") and said in found


@pytest.mark.parametrize(("there", "set"), [("epochs: 3", "steps=10"), ("steps: 10", "epochs=3")])
def test_a_length_on_the_command_line_replaces_that_of_the_file(
    tmp_path: Path, there: str, set: str
) -> None:
    """Our own remedy, `--set steps=93`, ended at the `epochs` of the file."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"{SMALLEST}{there}\n")
    config = RunConfig.load(path, [set])
    expected = (None, 10) if set == "steps=10" else (3.0, None)
    assert (config.epochs, config.steps) == expected
    with pytest.raises(UsageError, match="are both given"):
        RunConfig.load(path, ["steps=10", "epochs=3"])


def test_first_weights_are_looked_for_beside_the_run_file(tmp_path: Path) -> None:
    text = SMALLEST.replace("{asset: bert}", "{asset: bert, init: output/first/model}")
    assert "mine.yaml:3: `output/first/model` is neither `pretrained` nor `scratch`" in refused(
        tmp_path, text
    )
    folder = tmp_path / "output" / "first" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    assert load(tmp_path, text).model.folder == folder
    assert load(tmp_path).model.folder is None


@pytest.mark.parametrize(
    ("every", "seconds"), [("30 s", 30), ("10 min", 600), ("1.5h", 5400), ("500", None)]
)
def test_checkpoints_come_by_steps_or_by_the_clock(
    tmp_path: Path, every: str, seconds: float | None
) -> None:
    config = load(tmp_path, f"{SMALLEST}checkpoint: {{every: {every}}}\n")
    assert config.checkpoint.seconds == seconds


def test_lion_has_betas_of_its_own_unless_they_are_given(tmp_path: Path) -> None:
    config = load(tmp_path, f"{SMALLEST}optimizer: {{name: lion}}\n")
    assert config.optimizer.betas == (0.9, 0.99)
    assert [c.reason for c in config.explain() if c.key == "optimizer.betas"] == ["Lion's own"]
    assert "rank: 8" in load(tmp_path, f"{SMALLEST}lora: {{}}\n").to_yaml()
    given = load(tmp_path, f"{SMALLEST}optimizer: {{name: lion, betas: [0.95, 0.98]}}\n")
    assert given.optimizer.betas == (0.95, 0.98)


def test_a_set_on_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    text = f"{SMALLEST}batch: {{global: 8, micro: 2}}\n"
    given = (
        "batch.micro=4",
        "optimizer.lr=1e-4",
        "slurm.options.mem=10G",
        "epochs=2",
        "slurm.time=1:00:00",
    )
    config = load(tmp_path, text, *given)
    found = config.to_mapping()
    assert (found["batch"], found["epochs"], found["optimizer"]["lr"]) == (
        {"global": 8, "micro": 4}, 2.0, 1e-4,
    )  # fmt: skip
    assert config.slurm.time == "1:00:00"  # YAML 1.1 would take it for 3600
    assert config.slurm.options == {"mem": "10G"} and {"batch.micro", "slurm.time"} <= config.given


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("batch.micr=4", "--set batch.micr: unknown key `micr`"),
        ("batch.micro=many", "--set batch.micro: `batch.micro` must be"),
        ("batch.micro", "--set batch.micro: expected key=value"),
        ("=4", "--set =4: expected key=value"),
        ("batch={", "is not a YAML value"),
        ("seed.x=1", "--set seed.x: `seed` must be"),
    ],
)
def test_a_mistyped_set_is_reported_as_such(tmp_path: Path, override: str, said: str) -> None:
    assert said in refused(tmp_path, f"{SMALLEST}batch: {{global: 8}}\n", override)


def test_what_was_understood_is_a_run_file_of_the_same_run(tmp_path: Path) -> None:
    later = {"neural-chat-qlora"}  # LoRA
    files = [
        path for path in sorted((REPOSITORY / "runs").glob("*.yaml")) if path.stem not in later
    ]
    assert files
    for path in files:
        config = RunConfig.load(path)
        again = load(tmp_path, config.to_yaml(), name="again")
        assert again.to_mapping() == config.to_mapping(), path


@pytest.mark.parametrize(
    ("lines", "said", "remedy"),
    [
        ("quantization: {bits: 4}", "quantised weights cannot be trained", "Add `lora: {rank: 8}`"),
        (
            "lora: {}\nengine: {zero: 3}\nquantization: {}",
            "does not go with engine.zero: 3",
            "zero: 2}",
        ),
        (
            "lora: {}\nengine: {name: fsdp}\nquantization: {}",
            "does not go with engine.name: fsdp",
            "{name: ddp}",
        ),
        (
            "lora: {}\nengine: {offload: nvme, nvme_path: /scratch}\nquantization: {}",
            "does not go with engine.offload: nvme, which is ZeRO stage 3",
            "zero: 2}",
        ),
        (
            "lora: {}\nquantization: {bits: 8, double: false}",
            "`quantization.double` is only for quantization.bits: 4; it is 8 here",
            "set quantization.bits: 4",
        ),
        ("lora: {rank: 0}", "`lora.rank` must be at least 1", ""),
        ("lora: {}\nquantization: {type: int4}", "`quantization.type`", "nf4"),
    ],
)
def test_what_lora_and_quantised_weights_do_not_go_with_is_reported(
    tmp_path: Path, lines: str, said: str, remedy: str
) -> None:
    found = refused(tmp_path, f"{SMALLEST}{lines}\n")
    assert said in found and remedy in found
    assert found.startswith(f"mine.yaml:{4 + len(lines.splitlines())}:")
