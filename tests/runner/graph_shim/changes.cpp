// Changes graphs as step_graph.cpp does: reads one a line from standard input, writes what came of it as JSON, a line
// each. The driver is the libcuda.so.1 that the loader finds (driver.cpp).
//
//   line    TAG graph
//   graph   NODES node... EDGES edge...
//   node    k NAME | o TYPE | g graph
//   edge    FROM TO TYPE           numbers of nodes; TYPE 1: programmatic
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "graph_nodes.h"
#include "graph_overlap.h"

using headrace::cuda::check;
using headrace::cuda::Driver;
using headrace::cuda::EdgeData;

namespace {

struct Test {
  int (*make_graph)(CUgraph_st**, unsigned);
  int (*add_child)(CUgraphNode*, CUgraph_st*, CUgraphNode const*, size_t, CUgraph_st*);
  int (*add_kernel)(CUgraphNode*, CUgraph_st*, const char*);
  int (*add_other)(CUgraphNode*, CUgraph_st*, int);

  Test() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw std::runtime_error(name);
    };
    find(make_graph, "cuGraphCreate");
    find(add_child, "cuGraphAddChildGraphNode");
    find(add_kernel, "test_add_kernel");
    find(add_other, "test_add_other");
  }
};

CUgraph_st* read_graph(std::istream& in, Test& test);

CUgraphNode read_node(std::istream& in, CUgraph_st* graph, Test& test) {
  CUgraphNode made = nullptr;
  char kind = 0;
  in >> kind;
  if (kind == 'k') {
    std::string name;
    in >> name;
    check(test.add_kernel(&made, graph, name.c_str()), "adding a kernel");
  } else if (kind == 'o') {
    int type = 0;
    in >> type;
    check(test.add_other(&made, graph, type), "adding a node");
  } else {
    CUgraph_st* child = read_graph(in, test);
    check(test.add_child(&made, graph, nullptr, 0, child), "adding a child graph");
    Driver::get().destroy_graph(child);
  }
  return made;
}

CUgraph_st* read_graph(std::istream& in, Test& test) {
  CUgraph_st* graph = nullptr;
  check(test.make_graph(&graph, 0), "making a graph");
  size_t nodes = 0, edges = 0;
  in >> nodes;
  std::vector<CUgraphNode> made;
  for (size_t i = 0; i < nodes; i++) made.push_back(read_node(in, graph, test));
  in >> edges;
  for (size_t i = 0; i < edges; i++) {
    size_t from = 0, to = 0;
    unsigned type = 0;
    in >> from >> to >> type;
    auto kind = static_cast<unsigned char>(type);
    EdgeData data{kind, 0, kind, {}};
    if (auto add = Driver::get().add_edges) check(add(graph, &made[from], &made[to], &data, 1), "adding an edge");
  }
  return graph;
}

void write_graph(std::ostream& out, CUgraph_st* graph);

void write_node(std::ostream& out, CUgraphNode node) {
  auto& driver = Driver::get();
  int type = headrace::cuda::type_of(node);
  out << "{\"type\": " << type;
  if (type == headrace::cuda::kKernel) {
    headrace::cuda::KernelNodeParams p{};
    check(driver.kernel_parameters(node, &p), "reading a kernel");
    const char* name = nullptr;
    check(driver.function_name(&name, p.function), "reading a kernel");
    out << ", \"name\": \"" << name << "\"";
  } else if (type == headrace::cuda::kGraph) {
    out << ", \"child\": ";
    write_graph(out, headrace::cuda::child_of(node));
  }
  out << "}";
}

void write_graph(std::ostream& out, CUgraph_st* graph) {
  auto nodes = headrace::cuda::nodes_of(graph);
  out << "{\"nodes\": [";
  for (size_t i = 0; i < nodes.size(); i++) {
    out << (i ? ", " : "");
    write_node(out, nodes[i]);
  }
  out << "], \"edges\": [";
  auto edges = headrace::cuda::edges_of(graph);
  auto number = [&](CUgraphNode node) { return std::find(nodes.begin(), nodes.end(), node) - nodes.begin(); };
  for (size_t i = 0; i < edges.size(); i++) {
    auto& data = edges.data[i];
    out << (i ? ", " : "") << "[" << number(edges.from[i]) << ", " << number(edges.to[i]) << ", "
        << int(data.from_port) << ", " << int(data.type) << "]";
  }
  out << "]}";
}

}  // namespace

int main() {
  Test test;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    std::ostringstream out;
    try {
      std::string tag;
      in >> tag;
      CUgraph_st *given = read_graph(in, test), *own = nullptr;
      check(Driver::get().clone(&own, given), "copying a graph");
      size_t early = headrace::cuda::overlap(own, tag);
      out << "{\"early\": " << early;
      if (Driver::get().can_overlap()) {
        out << ", \"graph\": ";
        write_graph(out, own);
        out << ", \"given\": ";
        write_graph(out, given);
      }
      out << "}";
      Driver::get().destroy_graph(own);
      Driver::get().destroy_graph(given);
    } catch (const std::exception& error) {
      out.str("");
      out << "{\"error\": \"" << error.what() << "\"}";
    }
    std::cout << out.str() << std::endl;
  }
}
