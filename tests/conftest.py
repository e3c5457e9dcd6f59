"""Fixtures of all tests: Hubs on loopback. In CI, a test that could run may not skip silently."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.environ import kept_environment
from tests.support.environment.channel import conda_channel
from tests.support.environment.laptop import environment_laptop
from tests.support.scheduling import in_order, make_scheduler
from tests.support.servers.hubs import TestHub
from tests.support.staging import MANIFEST, Laptop
from tests.support.warm import provide, start_children_warm

__all__ = ["conda_channel", "environment_laptop"]
# A busy machine checks as an idle one does.
settings.register_profile("airlift", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("airlift")


@pytest.fixture(autouse=True, scope="session")
def _no_traces_at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Receipts and journals of verifications go to a folder of the tests, not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _own_variables() -> Iterator[None]:
    """What a test, or a command that it runs in this process, sets ends with the test."""
    with kept_environment():
        yield


@pytest.fixture(scope="session", autouse=True)
def _warm_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    provide(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("torch"):
            start_children_warm(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_shared_store() -> None:
    """No test reads or writes the store of the user who runs the tests."""
    os.environ["AIRLIFT_STORE"] = "none"


@pytest.fixture
def hub_factory(tmp_path: Path) -> Iterator[Callable[..., TestHub]]:
    """Starts Hubs with options of `LoopbackHub`."""
    with ExitStack() as stack:

        def start(**options: Any) -> TestHub:
            count = len(list(tmp_path.glob("hub-*")))
            return TestHub(tmp_path / f"hub-{count}", stack, **options)

        yield start


@pytest.fixture
def hub(hub_factory: Callable[..., TestHub]) -> TestHub:
    """A running Hub with no repositories."""
    return hub_factory()


@pytest.fixture
def laptop(hub: TestHub, tmp_path: Path) -> Laptop:
    """A folder with a manifest of a small model and a small dataset, and a Hub that has both."""
    return _new_laptop(hub, tmp_path / "laptop")


@pytest.fixture(scope="session")
def undisturbed_id(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundle id of `laptop`'s manifest, without faults, from `stage` in its own process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with ExitStack() as stack:
        laptop = _new_laptop(TestHub(folder / "hub", stack), folder / "laptop")
        laptop.own_process = True
        return laptop.fetched()


def _new_laptop(hub: TestHub, folder: Path) -> Laptop:
    folder.mkdir()
    laptop = Laptop(folder, hub)
    laptop.publish()
    laptop.write(MANIFEST)
    return laptop


def pytest_configure() -> None:
    """Commands inherit ignored signals from the suite (SIGINT after `&`, SIGHUP after `nohup`)."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # A handler: the suite outlives the terminal, and its children get the default action.
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_finish() -> None:
    """The tests themselves are no garbage: a collection of it need not look at them each time."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        in_order(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests of a file, and one all tests on the Slurm site."""
    return make_scheduler(config, log)


def _skip_is_fine(item: pytest.Item | None) -> bool:
    """Tests of hardware or rights that this machine does not have may skip, also in CI."""
    if item is None:
        return False
    return item.get_closest_marker("gpu") is not None or (
        item.get_closest_marker("site") is not None and os.geteuid() != 0
    )


def _refuse_skip(
    report: pytest.TestReport | pytest.CollectReport, item: pytest.Item | None
) -> None:
    if (
        not os.environ.get("AIRLIFT_NO_SKIP")
        or report.outcome != "skipped"
        or hasattr(report, "wasxfail")
    ):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not _skip_is_fine(item):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped (AIRLIFT_NO_SKIP): {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report, item)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report, None)
    return report
