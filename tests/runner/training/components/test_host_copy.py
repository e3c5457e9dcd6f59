"""The copies that a checkpoint is written from while training continues."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from runner.training.components.asynchronous import HostCopy


@pytest.fixture
def copies() -> HostCopy:
    return HostCopy(torch.device("cpu"))


def test_training_on_does_not_change_a_copy(copies: HostCopy) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    state = OrderedDict(model={"w": weight}, step=[torch.tensor(1), (weight[:2], "text")])
    copied = copies.stage(state)
    with torch.no_grad():
        weight.zero_()
    state["model"]["w"] = None  # type: ignore[index]
    assert isinstance(copied, OrderedDict)
    assert copied["model"]["w"].tolist() == [1, 1, 1]
    assert not copied["model"]["w"].requires_grad
    assert copied["step"][0] == 1
    assert copied["step"][1][1] == "text"
    assert copied["step"][1][0].tolist() == [1, 1]


def test_a_weight_with_two_names_is_copied_once(copies: HostCopy) -> None:
    weight = torch.ones(4, 2)
    copied = copies.stage({"in": weight, "out": weight, "view": weight.T, "row": weight[1]})
    assert len({tensor.untyped_storage().data_ptr() for tensor in copied.values()}) == 1
    assert copied["view"].shape == (2, 4) and copied["row"].storage_offset() == 2


def test_the_memory_is_kept_for_the_next_copy_and_freed_with_the_tensor(copies: HostCopy) -> None:
    weight = torch.ones(3)
    first = copies.stage({"w": weight})["w"]
    weight.fill_(2)
    second = copies.stage({"w": weight})["w"]
    assert first.data_ptr() == second.data_ptr() and first.tolist() == [2, 2, 2]
    assert len(copies._memory) == 1
    del weight
    assert len(copies._memory) == 0
    assert second.tolist() == [2, 2, 2]


@pytest.fixture
def one_rank(tmp_path: object) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_shard_stays_a_shard_with_memory_of_its_own(copies: HostCopy, one_rank: None) -> None:
    sharded = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    copied = copies.stage({"w": sharded})["w"]
    sharded.to_local().zero_()
    assert isinstance(copied, DTensor)
    assert copied.placements == sharded.placements and copied.shape == (4, 2)
    assert copied.to_local().sum() == 8
