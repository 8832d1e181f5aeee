// Lets kernels of a recorded graph begin while the one before them still runs (programmatic dependent launch: CUDA
// 12.3, compute capability 9.0).
//
// A kernel that says it waits (WAIT_FOR_EARLIER in kernels/language.py; known by its name) touches nothing but
// constants before it has waited for all that comes before it. So the edge that leads to it need not hold back its
// start: it may begin once every block of the kernel before it has said NEXT_MAY_START or has ended. A wait is for the
// whole kernel before, which has waited itself, so what holds for one edge holds for a chain of them.
//
// Only a node with one predecessor is treated so. Most have more edges than they need (a residual is read again some
// kernels later): an edge from a node that another predecessor comes after says nothing new and is removed first.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "graph_nodes.h"

namespace headrace::cuda {

// The edges of a graph by the numbers of its nodes, and which nodes each one comes after.
class Order {
 public:
  explicit Order(CUgraph_st* graph) : nodes(nodes_of(graph)), before(nodes.size()), into(nodes.size()) {
    std::map<CUgraphNode, size_t> numbers;
    for (size_t i = 0; i < nodes.size(); i++) numbers[nodes[i]] = i;
    auto edges = edges_of(graph);
    for (size_t i = 0; i < edges.size(); i++) {
      size_t to = numbers.at(edges.to[i]);
      before[to].push_back(numbers.at(edges.from[i]));
      into[to].add(edges.from[i], edges.to[i], edges.data[i]);
    }
    ancestors_.resize(nodes.size());
    for (size_t i = 0; i < nodes.size(); i++) find_ancestors(i);
  }

  // Predecessors of a node that are not before another of its predecessors.
  std::vector<size_t> nearest(size_t node) const {
    std::vector<size_t> found;
    for (size_t one : before[node]) {
      bool further = false;
      for (size_t other : before[node]) further = further || ancestors_[other][one];
      if (!further) found.push_back(one);
    }
    return found;
  }

  std::vector<CUgraphNode> nodes;
  std::vector<std::vector<size_t>> before;
  std::vector<Edges> into;

 private:
  // Depth first without recursion: a step has hundreds of nodes in a row.
  void find_ancestors(size_t node) {
    std::vector<size_t> open{node};
    while (!open.empty()) {
      size_t at = open.back();
      size_t waiting = open.size();
      if (ancestors_[at].empty()) {
        for (size_t one : before[at]) {
          if (ancestors_[one].empty()) open.push_back(one);
        }
      }
      if (open.size() > waiting) continue;
      open.pop_back();
      if (!ancestors_[at].empty()) continue;
      ancestors_[at].assign(nodes.size(), false);
      for (size_t one : before[at]) {
        ancestors_[at][one] = true;
        for (size_t i = 0; i < nodes.size(); i++) {
          if (ancestors_[one][i]) ancestors_[at][i] = true;
        }
      }
    }
  }

  std::vector<std::vector<bool>> ancestors_;
};

// Whether the node is a kernel whose name has `tag` in it.
inline bool is_tagged(CUgraphNode node, const std::string& tag) {
  auto& driver = Driver::get();
  if (type_of(node) != kKernel) return false;
  KernelNodeParams parameters{};
  if (driver.kernel_parameters(node, &parameters) != 0) return false;
  const char* name = nullptr;
  if (!parameters.function || driver.function_name(&name, parameters.function) != 0 || !name) return false;
  return std::strstr(name, tag.c_str()) != nullptr;
}

// Has the kernels of `graph` that are tagged begin early; how many do.
inline size_t overlap(CUgraph_st* graph, const std::string& tag) {
  auto& driver = Driver::get();
  if (!driver.can_overlap()) return 0;
  Order order(graph);
  const EdgeData early{1, 0, 1, {}};  // from a kernel's programmatic port, of the programmatic type
  size_t found = 0;
  for (size_t node = 0; node < order.nodes.size(); node++) {
    if (order.before[node].empty() || !is_tagged(order.nodes[node], tag)) continue;
    auto nearest = order.nearest(node);
    // Edges out of library products (child graphs) stay plain: taking the products' kernels out of their child graphs
    // gave other results in one step of an H200.
    if (nearest.size() != 1 || type_of(order.nodes[nearest[0]]) != kKernel) continue;
    CUgraphNode last = order.nodes[nearest[0]];
    auto& into = order.into[node];
    check(driver.remove_dependencies(graph, into.from.data(), into.to.data(), into.data.data(), into.size()),
          "ordering the step");
    check(driver.add_edges(graph, &last, &order.nodes[node], &early, 1), "ordering the step");
    found++;
  }
  return found;
}

}  // namespace headrace::cuda
