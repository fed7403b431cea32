"""Whatever a command started can be found and ended, however deep and stubborn it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from penstock.deployments.supervision.processes import descendants, end, is_running

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_stubborn_child_and_its_own_child_end():
    others = descendants(os.getpid())  # of tests before this one in the same process
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    found = [pid for pid in descendants(os.getpid()) if pid not in others]
    assert found == [child.pid, grandchild]
    began_s = time.monotonic()
    end([child.pid, grandchild], grace_s=0.3)
    assert time.monotonic() - began_s < 10
    child.wait(timeout=60)  # killed, as it would not listen
    assert child.returncode < 0
    assert not is_running(child.pid)
    assert not is_running(grandchild)
    child.stdout.close()


def test_a_process_that_ended_but_was_not_waited_for_does_not_run():
    child = subprocess.Popen(["true"])
    deadline_s = time.monotonic() + 60
    while is_running(child.pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not is_running(child.pid)
    child.wait()
    end([child.pid], grace_s=0.1)  # nothing there: nothing happens


def test_a_thread_that_aborts_does_not_decide_how_the_process_ends():
    """As Ray's library does where Ray's processes are killed while it waits for them."""
    script = """
import ctypes, os, threading, time
from penstock.deployments.supervision.processes import hold_aborts
hold_aborts()
threads = [threading.Thread(target=ctypes.CDLL(None).abort) for _ in range(2)]
for each in threads: each.start()
time.sleep(0.3)
assert all(each.is_alive() for each in threads)
os._exit(130)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert done.returncode == 130
