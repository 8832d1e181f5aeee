// Nodes and edges of a recorded CUDA graph, read through the driver.
#pragma once

#include <vector>

#include "cuda_driver.h"

namespace headrace::cuda {

enum NodeType : int { kKernel = 0, kMemset = 2, kGraph = 4, kEmpty = 5 };

inline std::vector<CUgraphNode> nodes_of(CUgraph_st* graph) {
  auto& driver = Driver::get();
  size_t count = 0;
  check(driver.get_nodes(graph, nullptr, &count), "reading the step's graph");
  std::vector<CUgraphNode> nodes(count);
  check(driver.get_nodes(graph, nodes.data(), &count), "reading the step's graph");
  return nodes;
}

inline int type_of(CUgraphNode node) {
  int type = -1;
  check(Driver::get().node_type(node, &type), "reading the step's graph");
  return type;
}

inline CUgraph_st* child_of(CUgraphNode node) {
  CUgraph_st* child = nullptr;
  check(Driver::get().child_graph(node, &child), "reading the step's graph");
  return child;
}

// Edge i leads from from[i] to to[i].
struct Edges {
  std::vector<CUgraphNode> from, to;
  std::vector<EdgeData> data;

  size_t size() const { return from.size(); }
  void add(CUgraphNode before, CUgraphNode after, EdgeData kind) {
    from.push_back(before);
    to.push_back(after);
    data.push_back(kind);
  }
};

inline Edges edges_of(CUgraph_st* graph) {
  auto& driver = Driver::get();
  size_t count = 0;
  check(driver.get_edges(graph, nullptr, nullptr, nullptr, &count), "reading the step's graph");
  Edges edges{std::vector<CUgraphNode>(count), std::vector<CUgraphNode>(count), std::vector<EdgeData>(count)};
  if (count == 0) return edges;
  check(driver.get_edges(graph, edges.from.data(), edges.to.data(), edges.data.data(), &count),
        "reading the step's graph");
  return edges;
}

}  // namespace headrace::cuda
