// Replaces child graphs of a recorded graph by the nodes in them.
//
// A library's product comes as a child graph: MLX captures what the library launches. Nothing that follows a child
// graph can begin before all of it has ended; what follows a kernel can (graph_overlap.h). So the child's nodes are
// copied beside it, in the order they had, and take over its edges:
//
//     p --> [ a --> b ] --> s        p --> a --> b --> s
//
// The nodes that nothing inside leads to come after what the child came after; what came after the child comes after
// the nodes that lead to nothing inside. Parameters, launch attributes (clusters) and kinds of edges inside are kept.
// A child of other nodes than kernels, memsets, empty ones and such children stays as it is, and so does one that the
// driver does not let be copied.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "graph_nodes.h"

namespace headrace::cuda {

// What a graph consists of, by numbers: nodes (null: an empty node), edges between them, those at its two ends.
struct Contents {
  struct Edge {
    size_t from, to;
    EdgeData data;
  };
  std::vector<CUgraphNode> nodes;
  std::vector<Edge> edges;
  std::vector<size_t> entries, exits;
};

inline std::optional<Contents> contents_of(CUgraph_st* graph);

// A node as a graph of one; a child graph as what is in it. Nothing for a node that cannot be copied.
inline std::optional<Contents> contents_of_node(CUgraphNode node) {
  switch (type_of(node)) {
    case kKernel:
    case kMemset:
      return Contents{{node}, {}, {0}, {0}};
    case kEmpty:
      return Contents{{nullptr}, {}, {0}, {0}};
    case kGraph:
      return contents_of(child_of(node));
    default:
      return std::nullopt;
  }
}

inline std::optional<Contents> contents_of(CUgraph_st* graph) {
  auto parts = nodes_of(graph);
  if (parts.empty()) return Contents{{nullptr}, {}, {0}, {0}};
  Contents all;
  std::vector<std::vector<size_t>> entries, exits;  // of each part, as numbers in `all`
  for (auto part : parts) {
    auto found = contents_of_node(part);
    if (!found) return std::nullopt;
    size_t first = all.nodes.size();
    all.nodes.insert(all.nodes.end(), found->nodes.begin(), found->nodes.end());
    for (auto& edge : found->edges) all.edges.push_back({first + edge.from, first + edge.to, edge.data});
    for (auto* ends : {&found->entries, &found->exits}) {
      for (auto& one : *ends) one += first;
    }
    entries.push_back(std::move(found->entries));
    exits.push_back(std::move(found->exits));
  }
  auto number = [&](CUgraphNode node) { return std::find(parts.begin(), parts.end(), node) - parts.begin(); };
  std::vector<bool> begins(parts.size(), true), ends(parts.size(), true);
  auto edges = edges_of(graph);
  for (size_t i = 0; i < edges.size(); i++) {
    auto from = number(edges.from[i]), to = number(edges.to[i]);
    ends[from] = begins[to] = false;
    for (size_t one : exits[from]) {
      for (size_t other : entries[to]) all.edges.push_back({one, other, edges.data[i]});
    }
  }
  for (size_t i = 0; i < parts.size(); i++) {
    if (begins[i]) all.entries.insert(all.entries.end(), entries[i].begin(), entries[i].end());
    if (ends[i]) all.exits.insert(all.exits.end(), exits[i].begin(), exits[i].end());
  }
  return all;
}

// Adds a copy of `node` (null: an empty node) to `graph`; null where the driver refuses it. The parameters that the
// driver hands out belong to the node and are copied when they are passed on.
inline CUgraphNode copied(CUgraphNode node, CUgraph_st* graph) {
  auto& driver = Driver::get();
  CUgraphNode made = nullptr;
  if (!node) return driver.add_empty(&made, graph, nullptr, 0) == 0 ? made : nullptr;
  if (type_of(node) == kMemset) {
    MemsetNodeParams parameters{};
    CUctx_st* context = nullptr;
    if (driver.memset_parameters(node, &parameters) != 0 || driver.current_context(&context) != 0) return nullptr;
    return driver.add_memset(&made, graph, nullptr, 0, &parameters, context) == 0 ? made : nullptr;
  }
  KernelNodeParams parameters{};
  if (driver.kernel_parameters(node, &parameters) != 0) return nullptr;
  if (driver.add_kernel(&made, graph, nullptr, 0, &parameters) != 0) return nullptr;
  if (driver.copy_attributes(made, node) == 0) return made;
  driver.destroy_node(made);
  return nullptr;
}

// Puts copies of `contents` in the place of `node`; whether that went well. If not, the graph is as it was.
inline bool replace(CUgraph_st* graph, CUgraphNode node, const Contents& contents) {
  auto& driver = Driver::get();
  std::vector<CUgraphNode> made;
  auto undone = [&] {
    for (auto one : made) driver.destroy_node(one);
    return false;
  };
  for (auto one : contents.nodes) {
    auto copy = copied(one, graph);
    if (!copy) return undone();
    made.push_back(copy);
  }
  Edges added;
  for (auto& edge : contents.edges) added.add(made[edge.from], made[edge.to], edge.data);
  auto around = edges_of(graph);
  for (size_t i = 0; i < around.size(); i++) {
    if (around.to[i] == node) {
      for (size_t one : contents.entries) added.add(around.from[i], made[one], around.data[i]);
    } else if (around.from[i] == node) {
      for (size_t one : contents.exits) added.add(made[one], around.to[i], around.data[i]);
    }
  }
  if (added.size() > 0 &&
      driver.add_edges(graph, added.from.data(), added.to.data(), added.data.data(), added.size()) != 0) {
    return undone();
  }
  return driver.destroy_node(node) == 0 || undone();
}

// Replaces what child graphs of `graph` can be; how many were.
inline size_t flatten(CUgraph_st* graph) {
  if (!Driver::get().can_flatten()) return 0;
  size_t replaced = 0;
  for (auto node : nodes_of(graph)) {
    if (type_of(node) != kGraph) continue;
    auto contents = contents_of(child_of(node));
    if (contents && replace(graph, node, *contents)) replaced++;
  }
  return replaced;
}

}  // namespace headrace::cuda
