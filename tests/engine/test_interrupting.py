"""Which processes SIGTERM ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fedray.engine.interrupting import interruptible, starting_helpers

SAYS_WHETHER_SIGTERM_ENDS_IT = """
import os, signal
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
"""

ENDS_A_CHILD = """
import multiprocessing, time
from fedray.engine.interrupting import let_children_end

let_children_end()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
child.start()
child.terminate()
child.join()
print(child.exitcode)
"""


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_helpers_and_what_they_start_outlive_sigterm():
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SAYS_WHETHER_SIGTERM_ENDS_IT!r}])"
    with starting_helpers():
        assert run(nested).stdout == "alive\n"
    assert run(SAYS_WHETHER_SIGTERM_ENDS_IT).returncode == -signal.SIGTERM


def test_a_helper_can_end_what_it_forks():
    with starting_helpers():
        assert run(ENDS_A_CHILD).stdout == "-15\n"


def test_signals_that_come_together_are_one(monkeypatch):
    said, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with interruptible(said.append, "stopping") as stopping:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.is_set()
        assert len(said) == 1
        now[0] = 10.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
