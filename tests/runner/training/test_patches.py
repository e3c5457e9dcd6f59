"""What is changed inside the libraries: it works with the versions here, and others are named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import core_model_loading, masking_utils

from runner.training import patches
from tests.support.code import run_warm


@pytest.fixture(autouse=True)
def note_again() -> Iterator[None]:
    patches._note_version.cache_clear()
    yield
    patches._note_version.cache_clear()


def test_the_versions_here_have_every_name_that_is_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for library in patches.COMPARED:
        patches._note_version(library)
    code = (
        "import sys\n"
        "from deepspeed.runtime.engine import DeepSpeedEngine as engine\n"
        "from deepspeed.runtime import compiler\n"
        "from runner.training import patches\n"
        "compiles = compiler.compile\n"
        "patches.omit_shared_memory_op(); patches.import_uncompiled_muon()\n"
        "assert compiler.compile is compiles\n"
        "assert 'deepspeed.runtime.zero.muon.muon_optimizer' in sys.modules\n"
        "assert hasattr(engine, '_copy_recovery_script')\n"
    )
    done = run_warm(code)
    assert done.returncode == 0, done.stderr
    assert "note: " not in done.stderr + capsys.readouterr().err


def test_weights_keep_the_types_of_their_files() -> None:
    original, half = core_model_loading._materialize_copy, torch.zeros(2, dtype=torch.float16)
    with patches.in_file_types():
        kept = core_model_loading._materialize_copy(half, None, torch.float32)
    assert kept.dtype == torch.float16
    assert core_model_loading._materialize_copy is original


def test_documents_of_a_row_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: 1)
    patches.search_no_packed_sequences()
    assert masking_utils.find_packed_sequence_indices(torch.arange(3)[None]) is None


class Engine:
    """As DeepSpeed's, on a full disk."""

    def __init__(self) -> None:
        self.checkpoint_engine = self
        self._config = SimpleNamespace(load_universal_checkpoint=False)

    def save(self) -> None:
        raise OSError("full")

    def _copy_recovery_script(self) -> None:
        raise OSError("full too")


def test_faults_of_a_save_are_kept_until_all_ranks_are_through() -> None:
    engine, faults = Engine(), list[Exception]()
    with patches.faults_of_save(engine, faults):
        engine.save()
        engine._copy_recovery_script()
    assert [str(fault) for fault in faults] == ["full", "full too"]
    with pytest.raises(OSError, match="full"):
        engine.save()


def test_a_converted_checkpoint_is_loaded_as_one_and_later_ones_are_not() -> None:
    engine = Engine()
    with patches.loads_converted(engine):
        assert engine._config.load_universal_checkpoint
    assert not engine._config.load_universal_checkpoint


def test_the_allocator_is_changed_by_the_name_that_torch_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append, raising=False)
    assert patches.change_allocator("a") and made == ["a"]
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", made.append, raising=False)
    assert patches.change_allocator("b") and made == ["a", "b"]
    monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
    assert not patches.change_allocator("c") and "has no _set_alloc" in capsys.readouterr().err


def test_the_last_collectives_are_written_by_the_name_that_torch_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch._C import _distributed_c10d as c10d

    written = tmp_path / "flight-rank-0"
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        monkeypatch.setattr(c10d, name, name.encode, raising=False)
        patches.write_collectives(written)
        assert written.read_text() == name
        monkeypatch.delattr(c10d, name)
        monkeypatch.delattr(c10d, "_dump_nccl_trace", raising=False)
    written.unlink()
    patches.write_collectives(written)
    assert not written.exists() and "a hang shows stacks alone" in capsys.readouterr().err


def test_another_version_is_named_and_without_the_name_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patches, "version", lambda _library: "5.99.1.dev0")
    monkeypatch.delattr(masking_utils, "find_packed_sequence_indices")
    patches.search_no_packed_sequences()
    patches.search_no_packed_sequences()
    printed = capsys.readouterr().err
    assert printed.count("transformers 5.99.1.dev0 is installed") == 1
    assert "compared with 5.0 to 5.23 only" in printed
    assert "has no find_packed_sequence_indices: a GPU may wait" in printed
    assert not hasattr(masking_utils, "find_packed_sequence_indices")


def test_other_ranks_print_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patches, "is_first", lambda: False)
    monkeypatch.setattr(patches, "version", lambda _library: "6.0")
    with monkeypatch.context() as without:
        without.delattr(sys.modules["transformers.core_model_loading"], "_materialize_copy")
        with patches.in_file_types():
            pass
    assert capsys.readouterr().err == ""
