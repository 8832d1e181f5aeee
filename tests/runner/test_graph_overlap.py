"""What ``graph_flatten.h`` and ``graph_overlap.h`` make of graphs, over a driver that keeps graphs in memory.

``graph_shim/driver.cpp`` is that driver, ``graph_shim/changes.cpp`` the program that reads graphs and tells what
came of them. Everything is compared with what waiting means: one node comes after another when edges lead there,
all of a child graph after what the child comes after, and all before what comes after it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.runner.native_extension import NATIVE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
SHIM = Path(__file__).parent / "graph_shim"
TAG = "_waiting"
KERNEL, MEMSET, GRAPH, EMPTY, COPY = 0, 2, 4, 5, 1
LAUNCH = [7, 6, 5, 4, 3, 2, 1024]
EARLY = (1, 1)

Graph = dict[str, Any]
# A node's words, and edges as (from, to, 1 for a programmatic one).
Node = str
Edge = tuple[int, int, int]


def kernel(name: str, cluster: int = 1, argument: int = 0) -> Node:
    return f"k {name} {cluster} {argument}"


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

    def __call__(self, nodes: Sequence[Node], edges: Sequence[Edge], *, flat: bool = True) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{int(flat)} {TAG} {text(nodes, edges)}\n")
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


def name_of(node: Graph) -> str | None:
    """Kernels and memsets are told apart by these."""
    if node["type"] == KERNEL:
        return str(node["name"])
    return f"memset {node['memset'][2]}" if node["type"] == MEMSET else None


class Leaves:
    """All nodes of a graph that are not graphs, and which come before which."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Graph] = []
        self._next: list[set[int]] = []
        self._walk(graph)
        self.after = [self._reached(i) for i in range(len(self.nodes))]

    def _walk(self, graph: Graph) -> list[int]:
        parts = [self._part(node) for node in graph["nodes"]]
        for start, end, *_ in graph["edges"]:
            for leaf in parts[start]:
                self._next[leaf].update(parts[end])
        return [leaf for part in parts for leaf in part]

    def _part(self, node: Graph) -> list[int]:
        if node["type"] == GRAPH and node["child"]["nodes"]:
            return self._walk(node["child"])
        self.nodes.append(node)
        self._next.append(set())
        return [len(self.nodes) - 1]

    def _reached(self, start: int) -> set[int]:
        found: set[int] = set()
        pending = list(self._next[start])
        while pending:
            at = pending.pop()
            if at not in found:
                found.add(at)
                pending.extend(self._next[at])
        return found

    def order(self) -> set[tuple[str, str]]:
        """Pairs of kernels and memsets of which the second waits for the first."""
        names = [name_of(node) for node in self.nodes]
        return {
            (first, names[j])  # type: ignore[misc]
            for i, first in enumerate(names)
            for j in self.after[i]
            if first is not None and names[j] is not None
        }


def edges_into(graph: Graph, name: str) -> dict[str | int, tuple[int, int]]:
    """By the name (or type) of the node they come from, their ports and types."""
    nodes = graph["nodes"]
    return {
        name_of(nodes[start]) or nodes[start]["type"]: (port, kind)
        for start, end, port, kind in graph["edges"]
        if name_of(nodes[end]) == name
    }


def check(answer: Any) -> None:
    """The order is what it was, and just those kernels begin early that can."""
    given, made = answer["given"], answer["graph"]
    assert Leaves(made).order() == Leaves(given).order()
    counted = [Counter(json.dumps(node) for node in Leaves(graph).nodes) for graph in (given, made)]
    named = [
        {node: count for node, count in count.items() if json.loads(node)["type"] != EMPTY} for count in counted
    ]
    assert without_children(named[0]) == without_children(named[1])
    early = 0
    for number, node in enumerate(made["nodes"]):
        into = [(start, port, kind) for start, end, port, kind in made["edges"] if end == number]
        nearest = nearest_before(made, number)
        if TAG in (name_of(node) or "") and len(nearest) == 1 and made["nodes"][nearest[0]]["type"] == KERNEL:
            assert into == [(nearest[0], *EARLY)]
            early += 1
        else:
            found = {(name_of(made["nodes"][start]), name_of(node)) for start, port, _ in into if port}
            assert found <= given_early(given)
    assert answer["early"] == early


def given_early(graph: Graph) -> set[tuple[str | None, str | None]]:
    """Programmatic edges, those of child graphs among them, by names."""
    nodes = graph["nodes"]
    own = {(name_of(nodes[start]), name_of(nodes[end])) for start, end, port, _ in graph["edges"] if port}
    return own.union(*(given_early(node["child"]) for node in nodes if node["type"] == GRAPH))


def without_children(counted: dict[str, int]) -> dict[str, int]:
    """Without child graphs that are empty: those become empty nodes."""
    return {node: count for node, count in counted.items() if json.loads(node)["type"] != GRAPH}


def nearest_before(graph: Graph, number: int) -> list[int]:
    before: dict[int, set[int]] = {i: set() for i in range(len(graph["nodes"]))}
    for start, end, *_ in graph["edges"]:
        before[end].add(start)

    def all_before(node: int) -> set[int]:
        return before[node].union(*(all_before(one) for one in before[node]))

    direct = before[number]
    return [one for one in direct if not any(one in all_before(other) for other in direct)]


# -- kernels that begin early ----------------------------------------------------------------------------------


def test_each_kernel_of_a_chain_begins_early_but_the_first(change: Program) -> None:
    answer = change(*chain(*(kernel(f"{name}{TAG}") for name in "abcd")))
    check(answer)
    assert answer["early"] == 3
    assert edges_into(answer["graph"], f"c{TAG}") == {f"b{TAG}": EARLY}


def test_an_edge_that_others_imply_is_removed(change: Program) -> None:
    nodes, edges = chain(kernel("x"), kernel(f"norm{TAG}"), kernel(f"product{TAG}"), kernel(f"sum{TAG}"))
    answer = change(nodes, [*edges, (0, 3, 0), (1, 3, 0)])
    check(answer)
    assert edges_into(answer["graph"], f"sum{TAG}") == {f"product{TAG}": EARLY}


def test_after_two_unrelated_nodes_a_kernel_waits_for_both(change: Program) -> None:
    answer = change([kernel("a"), kernel("b"), kernel(f"c{TAG}")], [(0, 2, 0), (1, 2, 0)])
    check(answer)
    assert answer["early"] == 0
    assert edges_into(answer["graph"], f"c{TAG}") == {"a": (0, 0), "b": (0, 0)}


def test_a_kernel_that_is_not_tagged_keeps_its_edges(change: Program) -> None:
    nodes, edges = chain(kernel("a"), kernel(f"b{TAG}"), kernel("c"))
    answer = change(nodes, [*edges, (0, 2, 0)])
    check(answer)
    assert edges_into(answer["graph"], "c") == {"a": (0, 0), f"b{TAG}": (0, 0)}


@pytest.mark.parametrize("before", ["m 3", "e", f"o {COPY}", child([f"o {COPY}"])])
def test_what_is_not_a_kernel_is_waited_for(change: Program, before: Node) -> None:
    answer = change(*chain(before, kernel(f"a{TAG}")))
    check(answer)
    assert answer["early"] == 0
    assert list(edges_into(answer["graph"], f"a{TAG}").values()) == [(0, 0)]


def test_the_given_graph_is_left_as_it_is(change: Program) -> None:
    nodes, edges = chain(kernel("a"), kernel(f"b{TAG}"))
    assert change(nodes, edges)["given"]["edges"] == [[0, 1, 0, 0]]


# -- child graphs ----------------------------------------------------------------------------------------------


def test_behind_a_library_product_a_kernel_begins_early(change: Program) -> None:
    product = child([kernel("gemm", cluster=2, argument=77)])
    nodes, edges = chain(kernel(f"norm{TAG}"), product, kernel(f"gate{TAG}"))
    answer = change(nodes, edges)
    check(answer)
    assert (answer["flattened"], answer["early"]) == (1, 1)
    assert edges_into(answer["graph"], f"gate{TAG}") == {"gemm": EARLY}
    assert edges_into(answer["graph"], "gemm") == {f"norm{TAG}": (0, 0)}
    gemm = next(node for node in answer["graph"]["nodes"] if name_of(node) == "gemm")
    assert gemm == {"type": KERNEL, "name": "gemm", "cluster": 2, "argument": 77, "launch": LAUNCH}
    assert change(nodes, edges, flat=False)["early"] == 0


def test_edges_in_a_child_keep_their_kinds(change: Program) -> None:
    split = child(["m 5", kernel("split"), kernel("sum", cluster=4)], [(0, 1, 0), (1, 2, 1)])
    answer = change(*chain(kernel("a"), split, kernel(f"b{TAG}")))
    check(answer)
    assert answer["flattened"] == 1
    assert edges_into(answer["graph"], "memset 5") == {"a": (0, 0)}
    assert edges_into(answer["graph"], "split") == {"memset 5": (0, 0)}
    assert edges_into(answer["graph"], "sum") == {"split": EARLY}
    assert edges_into(answer["graph"], f"b{TAG}") == {"sum": EARLY}


def test_children_side_by_side_in_a_row_and_in_one_another(change: Program) -> None:
    inner = child([kernel("c"), kernel("d")])
    nodes = [child([kernel("a"), kernel("b")]), child(*chain(inner, child([]), kernel("e"))), kernel(f"f{TAG}")]
    answer = change(nodes, [(0, 1, 0), (1, 2, 0)])
    check(answer)
    assert (answer["flattened"], answer["early"]) == (2, 1)
    assert edges_into(answer["graph"], "d") == {"a": (0, 0), "b": (0, 0)}
    assert all(node["type"] != GRAPH for node in answer["graph"]["nodes"])


@pytest.mark.parametrize(
    "product",
    [
        child([kernel("a"), f"o {COPY}"]),
        child([kernel("a"), child([f"o {COPY}"])]),
        child([kernel("a"), kernel("once")]),
    ],
    ids=["unknown node", "unknown node further in", "refused by the driver"],
)
def test_a_child_that_cannot_be_copied_stays(change: Program, product: Node) -> None:
    answer = change(*chain(kernel("x"), product, kernel(f"b{TAG}")))
    check(answer)
    assert (answer["flattened"], answer["early"]) == (0, 0)
    assert answer["graph"] == answer["given"]


def test_an_older_driver_changes_nothing(tmp_path: Path) -> None:
    program = Program(compiled(tmp_path, "-DOLD_DRIVER"))
    answer = program(*chain(kernel("x"), child([kernel("a")]), kernel(f"b{TAG}")))
    program.close()
    assert answer == {"early": 0, "flattened": 0}


# -- any graph -------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn, names: list[int] | None = None, depth: int = 0) -> tuple[list[Node], list[Edge]]:
    """Nodes in any order; ``names`` counts the kernels and memsets so far."""
    names = [0] if names is None else names
    count = draw(st.integers(1, 9 if depth == 0 else 3))
    nodes = [draw(any_node(names, depth)) for _ in range(count)]
    places = draw(st.permutations(range(count)))  # of nodes, in an order that edges follow
    edges = []
    for i, start in enumerate(places):
        for end in places[i + 1 :]:
            if draw(st.booleans()):
                both = nodes[start][0] == nodes[end][0] == "k"
                edges.append((start, end, int(depth > 0 and both and draw(st.booleans()))))
    return nodes, edges


@st.composite
def any_node(draw: st.DrawFn, names: list[int], depth: int) -> Node:
    kind = draw(st.sampled_from("kkkkttttmeogg" if depth < 2 else "kkktm"))
    if kind == "g":
        return child(*draw(graphs(names, depth + 1)))
    if kind in "eo":
        return {"e": "e", "o": f"o {COPY}"}[kind]
    names[0] += 1
    if kind == "m":
        return f"m {names[0]}"
    return kernel(f"n{names[0]}{TAG if kind == 't' else ''}", draw(st.integers(1, 8)), draw(st.integers(0, 99)))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graph=graphs(), flat=st.booleans())
def test_any_graph_keeps_its_order(change: Program, graph: tuple[list[Node], list[Edge]], flat: bool) -> None:
    answer = change(*graph, flat=flat)
    check(answer)
    left = sum(node["type"] == GRAPH for node in answer["graph"]["nodes"])
    copied = sum(
        node["type"] == GRAPH and all(leaf["type"] != COPY for leaf in Leaves(node["child"]).nodes)
        for node in answer["given"]["nodes"]
    )
    assert answer["flattened"] == (copied if flat else 0)
    assert left == sum(node["type"] == GRAPH for node in answer["given"]["nodes"]) - answer["flattened"]
