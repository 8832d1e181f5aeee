"""What MLX launches on a CUDA device, recorded as a graph that can be launched again (``native/step_graph.cpp``).

Kernels of our own in it begin while the ones before them end (``native/graph_overlap.h``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from headrace.runner.kernels.language import WAITING, launches_early
from headrace.runner.kernels.native_extension import CUDA_HEADERS, Extension, ExtensionError, load

log = logging.getLogger("headrace.runner")

EXTENSION = Extension(
    "headrace_step_graph",
    ("step_graph.cpp", "graph_nodes.h", "graph_overlap.h", *CUDA_HEADERS),
    include="cuda_names",
)
_TIMED_LAUNCHES = 10


class Recorder:
    """Records what MLX evaluates on a CUDA device.

    Args:
        native: the extension module of ``step_graph.cpp``.
        early: whether kernels that wait for themselves may begin early.
    """

    def __init__(self, native: ModuleType, *, early: bool = False) -> None:
        self.native = native
        self._tag = WAITING if early else ""

    @staticmethod
    def for_device(*, early: bool = True) -> Recorder | None:
        """The recorder of a CUDA device; None elsewhere, and where the extension cannot be built (logged).

        ``early``: see above, where the device can.
        """
        if mx.default_device() != mx.gpu or mx.metal.is_available():
            return None
        try:
            return Recorder(load(EXTENSION), early=early and launches_early())
        except ExtensionError as error:
            log.warning("decode steps are not recorded, which costs the host time: %s", error)
            return None

    def record(self, build: Callable[[], list[mx.array]]) -> tuple[Any, list[mx.array]]:
        """Evaluate what ``build`` gives; the recording, and the evaluated arrays.

        Whatever ``build`` takes must have been evaluated. ``recording.error``: why it cannot be replayed, or "".
        """
        graph = self.native.StepGraph(self._tag)
        graph.begin()
        try:
            arrays = build()
            mx.eval(self.native.mark(graph, arrays), arrays)
        finally:
            graph.end()
        return graph, arrays

    def anew(self, array: mx.array) -> mx.array:
        """``array``; what MLX launches around it is instantiated for itself, as clusters of blocks need."""
        found: mx.array = self.native.anew(array)
        return found

    def device_seconds(self, build: Callable[[], list[mx.array]]) -> float:
        """Seconds that the device takes for what ``build`` gives, however long the host needs to build it.

        Raises RuntimeError when it cannot be recorded.
        """
        graph, arrays = self.record(build)
        if graph.error:
            raise RuntimeError(graph.error)
        del arrays
        return min(float(graph.seconds(_TIMED_LAUNCHES)) for _ in range(3))
