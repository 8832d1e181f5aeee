"""Python's garbage collector in a process that serves: rare, and kept off what lives as long as the process.

A full collection walks everything alive, modules and tokenizer included: some hundred thousand objects, near
100 ms in which no stream gets a token. So once a process is ready, what it holds is frozen (never walked again),
and the collector looks at the rest after more allocations than by default. Objects without cycles, nearly all of
a request, are freed by their reference counts as ever.
"""

from __future__ import annotations

import gc

# Container objects made and not freed before the young generation is walked; by default 700.
YOUNG_OBJECTS = 20_000
OLDER_GENERATIONS = 20, 20


def settle_collector() -> None:
    """Collect once, then freeze what is alive. May be called again when much of that was replaced."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *OLDER_GENERATIONS)
