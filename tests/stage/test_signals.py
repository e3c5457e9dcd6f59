"""A signal that comes where Python drops what is raised."""

from __future__ import annotations

import signal
import time

import pytest

from stage.processes import Ended, ending_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_in_a_callback_of_python_is_not_lost(number: int) -> None:
    """Python drops what is raised there: two of 107 Ctrl-C in `stage fetch` changed nothing."""

    class Signalled:
        def __del__(self) -> None:
            signal.raise_signal(number)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a test before this may have ended by it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, Ended)), ending_signals():
            Signalled()
            for _ in range(500):
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)
