"""What ``graph_overlap.h`` makes of graphs, over a driver that keeps graphs in memory.

``graph_shim/driver.cpp`` is that driver, ``graph_shim/changes.cpp`` the program that reads graphs and tells what
came of them. Everything is compared with what waiting means: one node comes after another when edges lead there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.runner.kernels.native_extension import NATIVE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
SHIM = Path(__file__).parent / "graph_shim"
TAG = "_waiting"
KERNEL, COPY, MEMSET, EMPTY = 0, 1, 2, 5
EARLY = (1, 1)

Graph = dict[str, Any]
# A node's words, and edges as (from, to, 1 for a programmatic one).
Node = str
Edge = tuple[int, int, int]


def kernel(name: str) -> Node:
    return f"k {name}"


def other(kind: int) -> Node:
    return f"o {kind}"


def text(nodes: Sequence[Node], edges: Sequence[Edge]) -> str:
    return " ".join(
        [str(len(nodes)), *nodes, str(len(edges)), *(f"{start} {end} {kind}" for start, end, kind in edges)]
    )


def child(nodes: Sequence[Node], edges: Sequence[Edge] = ()) -> Node:
    return f"g {text(nodes, edges)}"


def chain(*nodes: Node) -> tuple[list[Node], list[Edge]]:
    return list(nodes), [(i, i + 1, 0) for i in range(len(nodes) - 1)]


class Program:
    """``changes.cpp``, running."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [str(folder / "changes")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        )

    def __call__(self, nodes: Sequence[Node], edges: Sequence[Edge]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{TAG} {text(nodes, edges)}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        self._process.communicate()


def compiled(folder: Path, *flags: str) -> Path:
    includes = [NATIVE, NATIVE / "cuda_names", Path(mx.__file__).parent / "include"]
    usual = ["g++", "-std=c++20", "-O1", "-w", *flags]
    driver = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(SHIM / "driver.cpp")]
    changes = [*(f"-I{include}" for include in includes), str(SHIM / "changes.cpp"), "-ldl"]
    for sources, made in ((driver, "libcuda.so.1"), (changes, "changes")):
        done = subprocess.run([*usual, *sources, "-o", str(folder / made)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def change(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(compiled(tmp_path_factory.mktemp("graphs")))
    yield program
    program.close()


# -- what a graph means --------------------------------------------------------------------------------------


def edges_into(graph: Graph, node: int) -> list[tuple[int, int, int]]:
    """The nodes that they come from, their ports and types."""
    return [(start, port, kind) for start, end, port, kind in graph["edges"] if end == node]


def all_before(graph: Graph) -> list[set[int]]:
    """For each node those that it waits for, by way of others, too."""
    direct = [{start for start, *_ in edges_into(graph, node)} for node in range(len(graph["nodes"]))]

    def found(node: int) -> set[int]:
        return direct[node].union(*(found(one) for one in direct[node]))

    return [found(node) for node in range(len(direct))]


def check(answer: Any) -> None:
    """The nodes and their order are what they were, and just those kernels begin early that can."""
    given, made = answer["given"], answer["graph"]
    nodes, before = given["nodes"], all_before(given)
    assert made["nodes"] == nodes
    assert all_before(made) == before
    early = 0
    for number, node in enumerate(nodes):
        into = edges_into(given, number)
        direct = {start for start, *_ in into}
        nearest = [one for one in direct if not any(one in before[other] for other in direct)]
        if TAG in node.get("name", "") and len(nearest) == 1 and nodes[nearest[0]]["type"] == KERNEL:
            into = [(nearest[0], *EARLY)]
            early += 1
        assert edges_into(made, number) == into
    assert answer["early"] == early


# -- some graphs -----------------------------------------------------------------------------------------------


def test_each_kernel_of_a_chain_begins_early_but_the_first(change: Program) -> None:
    answer = change(*chain(*(kernel(f"{name}{TAG}") for name in "abcd")))
    check(answer)
    assert answer["early"] == 3
    assert edges_into(answer["graph"], 2) == [(1, *EARLY)]


def test_an_edge_that_others_imply_is_removed(change: Program) -> None:
    nodes, edges = chain(kernel("x"), kernel(f"norm{TAG}"), kernel(f"product{TAG}"), kernel(f"sum{TAG}"))
    answer = change(nodes, [*edges, (0, 3, 0), (1, 3, 0)])
    check(answer)
    assert edges_into(answer["graph"], 3) == [(2, *EARLY)]


def test_after_two_unrelated_nodes_a_kernel_waits_for_both(change: Program) -> None:
    answer = change([kernel("a"), kernel("b"), kernel(f"c{TAG}")], [(0, 2, 0), (1, 2, 0)])
    check(answer)
    assert answer["early"] == 0
    assert edges_into(answer["graph"], 2) == [(0, 0, 0), (1, 0, 0)]


def test_a_kernel_that_is_not_tagged_keeps_its_edges(change: Program) -> None:
    nodes, edges = chain(kernel("a"), kernel(f"b{TAG}"), kernel("c"))
    answer = change(nodes, [*edges, (0, 2, 0)])
    check(answer)
    assert edges_into(answer["graph"], 2) == [(1, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize(
    "before",
    [other(MEMSET), other(EMPTY), other(COPY), child([kernel("gemm")]), child([other(COPY)])],
    ids=["memset", "empty", "copy", "library product", "copy in a child graph"],
)
def test_what_is_not_a_kernel_is_waited_for(change: Program, before: Node) -> None:
    answer = change(*chain(before, kernel(f"a{TAG}")))
    check(answer)
    assert answer["early"] == 0
    assert edges_into(answer["graph"], 1) == [(0, 0, 0)]


def test_what_is_in_a_child_graph_is_left_as_it_is(change: Program) -> None:
    product = child(*chain(kernel("split"), kernel(f"sum{TAG}")))
    answer = change(*chain(kernel("a"), product, kernel(f"b{TAG}"), kernel(f"c{TAG}")))
    check(answer)
    assert answer["early"] == 1
    assert answer["graph"]["nodes"][1]["child"]["edges"] == [[0, 1, 0, 0]]


def test_the_given_graph_is_left_as_it_is(change: Program) -> None:
    nodes, edges = chain(kernel("a"), kernel(f"b{TAG}"))
    assert change(nodes, edges)["given"]["edges"] == [[0, 1, 0, 0]]


def test_an_older_driver_changes_nothing(tmp_path: Path) -> None:
    program = Program(compiled(tmp_path, "-DOLD_DRIVER"))
    answer = program(*chain(kernel("x"), kernel(f"b{TAG}")))
    program.close()
    assert answer == {"early": 0}


# -- any graph -------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn, depth: int = 0) -> tuple[list[Node], list[Edge]]:
    """Nodes in any order."""
    count = draw(st.integers(1, 9 if depth == 0 else 3))
    nodes = [draw(any_node(depth)) for _ in range(count)]
    places = draw(st.permutations(range(count)))  # of nodes, in an order that edges follow
    edges = []
    for i, start in enumerate(places):
        for end in places[i + 1 :]:
            if draw(st.booleans()):
                both = nodes[start][0] == nodes[end][0] == "k"
                edges.append((start, end, int(depth > 0 and both and draw(st.booleans()))))
    return nodes, edges


@st.composite
def any_node(draw: st.DrawFn, depth: int) -> Node:
    kind = draw(st.sampled_from("kkkkttttoogg" if depth < 2 else "kkkto"))
    if kind == "g":
        return child(*draw(graphs(depth + 1)))
    if kind == "o":
        return other(draw(st.sampled_from([COPY, MEMSET, EMPTY])))
    return kernel(f"n{TAG}" if kind == "t" else "n")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graph=graphs())
def test_any_graph_keeps_its_order(change: Program, graph: tuple[list[Node], list[Edge]]) -> None:
    check(change(*graph))
