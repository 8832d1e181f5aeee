"""Another program on the machine: takes as many MiB as each line of its standard input says, and touches them."""

from __future__ import annotations

import mmap
import sys

held: mmap.mmap | None = None
for line in sys.stdin:
    if held is not None:
        held.close()
        held = None
    size = int(line) * 2**20
    if size:
        held = mmap.mmap(-1, size)
        for offset in range(0, size, 4096):
            held[offset] = 1
    print(line, end="", flush=True)
