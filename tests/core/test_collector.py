"""The collector of a serving process, in a process of its own: its settings are of the whole interpreter."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
from headrace.core.collector import settle_collector

class Node:
    def __init__(self):
        self.me = self

old = Node()
settle_collector()
frozen = gc.get_freeze_count()
assert frozen > 1000 and not any(each is old for each in gc.get_objects())  # what was alive is not walked

young = Node()
gone = weakref.ref(young)
del young
for _ in range(100_000):
    Node()
assert gone() is None  # cycles made later are found, without anybody asking

gone = weakref.ref(old)
del old
settle_collector()
assert gone() is None and gc.get_freeze_count() > 1000  # what was replaced is found when asked again
"""


def test_what_is_alive_is_frozen_and_later_cycles_are_found() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
