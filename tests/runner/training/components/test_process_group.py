"""A broken collective: another rank is gone, so running again helps; or this rank's own fault."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError

from runner.launch.reach import says_lost_peer

NCCL = "NCCL error in: ProcessGroupNCCL.cpp:2395, {}, NCCL version 2.21.5\n{}"
GONE = (
    NCCL.format(
        "remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to",
    ),
    NCCL.format(
        "unhandled system error",
        "Last error:\nCall to recv from 10.0.0.2<41234> failed : Connection reset by peer",
    ),
    "[Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 1800000 ms",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] "
    "Connection closed by peer [127.0.0.1]:33907",
    "failed to recv, got 0 bytes",
)
OWN = (
    NCCL.format(
        "invalid usage",
        "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
    ),
    NCCL.format("unhandled cuda error", "Last error:\nCuda failure 'out of memory'"),
    NCCL.format(
        "unhandled system error",
        "Last error:\nError: failed to extend /dev/shm/nccl-Z3jAbC to 9637892 bytes",
    ),
)


@pytest.mark.parametrize(
    ("said", "lost"), [*((text, True) for text in GONE), *((text, False) for text in OWN)]
)
def test_only_a_rank_that_is_gone_is_called_lost(said: str, lost: bool) -> None:
    assert says_lost_peer(str(DistBackendError(said))) is lost
