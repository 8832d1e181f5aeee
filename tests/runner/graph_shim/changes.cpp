// Changes graphs as step_graph.cpp does: reads one a line from standard input, writes what came of it as JSON, a line
// each. The driver is the libcuda.so.1 that the loader finds (driver.cpp).
//
//   line    FLAT TAG graph         FLAT: 1 to take child graphs apart first
//   graph   NODES node... EDGES edge...
//   node    k NAME CLUSTER ARGUMENT | m VALUE | e | o TYPE | g graph
//   edge    FROM TO TYPE           numbers of nodes; TYPE 1: programmatic
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "graph_flatten.h"
#include "graph_overlap.h"

using headrace::cuda::check;
using headrace::cuda::Driver;
using headrace::cuda::EdgeData;

namespace {

struct Test {
  int (*make_graph)(CUgraph_st**, unsigned);
  int (*add_child)(CUgraphNode*, CUgraph_st*, CUgraphNode const*, size_t, CUgraph_st*);
  int (*add_other)(CUgraphNode*, CUgraph_st*, int);
  CUfunction (*function)(const char*);
  void (*set_cluster)(CUgraphNode, int);
  int (*cluster)(CUgraphNode);
  // What the headers ask for only where it is there.
  int (*add_kernel)(CUgraphNode*, CUgraph_st*, CUgraphNode const*, size_t, headrace::cuda::KernelNodeParams const*);

  Test() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw std::runtime_error(name);
    };
    find(make_graph, "cuGraphCreate");
    find(add_child, "cuGraphAddChildGraphNode");
    find(add_other, "test_add_other");
    find(function, "test_function");
    find(set_cluster, "test_set_cluster");
    find(cluster, "test_cluster");
    find(add_kernel, "cuGraphAddKernelNode_v2");
  }
};

CUgraph_st* read_graph(std::istream& in, Test& test);

CUgraphNode read_node(std::istream& in, CUgraph_st* graph, Test& test) {
  auto& driver = Driver::get();
  CUgraphNode made = nullptr;
  char kind = 0;
  in >> kind;
  if (kind == 'k') {
    std::string name;
    int cluster = 0;
    long long argument = 0;
    in >> name >> cluster >> argument;
    void* at = &argument;
    headrace::cuda::KernelNodeParams parameters{
        test.function(name.c_str()), {7, 6, 5}, {4, 3, 2}, 1024, &at, nullptr, nullptr, nullptr};
    check(test.add_kernel(&made, graph, nullptr, 0, &parameters), "adding a kernel");
    test.set_cluster(made, cluster);
  } else if (kind == 'm') {
    unsigned value = 0;
    in >> value;
    CUctx_st* context = nullptr;
    check(driver.current_context(&context), "asking for the context");
    headrace::cuda::MemsetNodeParams parameters{0x1000, 32, value, 4, 16, 2};
    check(driver.add_memset(&made, graph, nullptr, 0, &parameters, context), "adding a memset");
  } else if (kind == 'e') {
    check(driver.add_empty(&made, graph, nullptr, 0), "adding an empty node");
  } else if (kind == 'o') {
    int type = 0;
    in >> type;
    check(test.add_other(&made, graph, type), "adding a node");
  } else {
    CUgraph_st* child = read_graph(in, test);
    check(test.add_child(&made, graph, nullptr, 0, child), "adding a child graph");
    driver.destroy_graph(child);
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

void write_graph(std::ostream& out, CUgraph_st* graph, Test& test);

void write_node(std::ostream& out, CUgraphNode node, Test& test) {
  auto& driver = Driver::get();
  int type = headrace::cuda::type_of(node);
  out << "{\"type\": " << type;
  if (type == headrace::cuda::kKernel) {
    headrace::cuda::KernelNodeParams p{};
    check(driver.kernel_parameters(node, &p), "reading a kernel");
    const char* name = nullptr;
    check(driver.function_name(&name, p.function), "reading a kernel");
    out << ", \"name\": \"" << name << "\", \"cluster\": " << test.cluster(node)
        << ", \"argument\": " << *static_cast<long long*>(p.parameters[0]) << ", \"launch\": [" << p.grid[0] << ", "
        << p.grid[1] << ", " << p.grid[2] << ", " << p.block[0] << ", " << p.block[1] << ", " << p.block[2] << ", "
        << p.shared_bytes << "]";
  } else if (type == headrace::cuda::kMemset) {
    headrace::cuda::MemsetNodeParams p{};
    check(driver.memset_parameters(node, &p), "reading a memset");
    out << ", \"memset\": [" << p.to << ", " << p.pitch << ", " << p.value << ", " << p.element_bytes << ", "
        << p.width << ", " << p.height << "]";
  } else if (type == headrace::cuda::kGraph) {
    out << ", \"child\": ";
    write_graph(out, headrace::cuda::child_of(node), test);
  }
  out << "}";
}

void write_graph(std::ostream& out, CUgraph_st* graph, Test& test) {
  auto nodes = headrace::cuda::nodes_of(graph);
  out << "{\"nodes\": [";
  for (size_t i = 0; i < nodes.size(); i++) {
    out << (i ? ", " : "");
    write_node(out, nodes[i], test);
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
      bool flat = false;
      std::string tag;
      in >> flat >> tag;
      CUgraph_st *given = read_graph(in, test), *own = nullptr;
      check(Driver::get().clone(&own, given), "copying a graph");
      size_t flattened = flat ? headrace::cuda::flatten(own) : 0;
      size_t early = headrace::cuda::overlap(own, tag);
      out << "{\"early\": " << early << ", \"flattened\": " << flattened;
      if (Driver::get().can_overlap()) {
        out << ", \"graph\": ";
        write_graph(out, own, test);
        out << ", \"given\": ";
        write_graph(out, given, test);
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
