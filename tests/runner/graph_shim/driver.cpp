// What graph_overlap.h asks of CUDA's driver, for tests without one: graphs as nodes and edges in memory, with the
// driver's rules. With OLD_DRIVER there are none of the functions that came with CUDA 12.3.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

enum Result : int { kFine = 0, kInvalid = 1, kUnsupported = 801 };
enum Type : int { kKernel = 0, kGraph = 4, kEmpty = 5 };

struct EdgeData {
  unsigned char from_port, to_port, type, reserved[5];
  bool operator==(const EdgeData& other) const { return std::memcmp(this, &other, sizeof(EdgeData)) == 0; }
};

struct Function {
  std::string name;
};

struct KernelParams {
  Function* function;
  unsigned grid[3], block[3], shared_bytes;
  void **parameters, **extra;
  void *kernel, *context;
};

struct Graph;

struct Node {
  Graph* owner = nullptr;
  int type = kEmpty;
  KernelParams kernel{};
  std::unique_ptr<Graph> child;
};

struct Edge {
  Node *from, *to;
  EdgeData data;
};

struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<Edge> edges;

  Node* add(int type) {
    nodes.push_back(std::make_unique<Node>());
    nodes.back()->owner = this;
    nodes.back()->type = type;
    return nodes.back().get();
  }
  auto find(const Node* from, const Node* to) {
    return std::find_if(edges.begin(), edges.end(), [&](auto& edge) { return edge.from == from && edge.to == to; });
  }
};

std::unique_ptr<Graph> cloned(const Graph& graph) {
  auto made = std::make_unique<Graph>();
  std::map<const Node*, Node*> copies;
  for (auto& node : graph.nodes) {
    Node* copy = made->add(node->type);
    copies[node.get()] = copy;
    copy->kernel = node->kernel;
    if (node->child) copy->child = cloned(*node->child);
  }
  for (auto& edge : graph.edges) made->edges.push_back({copies.at(edge.from), copies.at(edge.to), edge.data});
  return made;
}

bool allowed(const Graph& graph, const Edge& edge) {
  if (edge.from->owner != &graph || edge.to->owner != &graph || edge.from == edge.to) return false;
  bool early = edge.data.from_port != 0 || edge.data.type != 0;
  return !early || (edge.from->type == kKernel && edge.to->type == kKernel);
}

// An array of `given` values into the caller's, whose length is *count; without an array only the count.
template <typename T>
int hand_out(const std::vector<T>& given, T* out, size_t* count) {
  if (out) std::copy_n(given.begin(), std::min(*count, given.size()), out);
  *count = given.size();
  return kFine;
}

}  // namespace

extern "C" {

// -- making graphs --------------------------------------------------------------------------------------------

int cuGraphCreate(Graph** made, unsigned) {
  *made = new Graph;
  return kFine;
}
int cuGraphDestroy(Graph* graph) {
  delete graph;
  return kFine;
}
int cuGraphClone(Graph** made, Graph* graph) {
  *made = cloned(*graph).release();
  return kFine;
}
int cuGraphAddChildGraphNode(Node** made, Graph* graph, Node* const*, size_t, Graph* child) {
  *made = graph->add(kGraph);
  (*made)->child = cloned(*child);
  return kFine;
}

// -- reading them ---------------------------------------------------------------------------------------------

int cuGraphGetNodes(Graph* graph, Node** out, size_t* count) {
  std::vector<Node*> found;
  for (auto& node : graph->nodes) found.push_back(node.get());
  return hand_out(found, out, count);
}
int cuGraphNodeGetType(Node* node, int* type) {
  *type = node->type;
  return kFine;
}
int cuGraphChildGraphNodeGetGraph(Node* node, Graph** graph) {
  *graph = node->child.get();
  return *graph ? kFine : kInvalid;
}
#ifndef OLD_DRIVER
int cuGraphKernelNodeGetParams_v2(Node* node, KernelParams* params) {
  *params = node->kernel;
  return node->type == kKernel ? kFine : kInvalid;
}
int cuFuncGetName(const char** name, Function* function) {
  *name = function->name.c_str();
  return kFine;
}
int cuGraphGetEdges_v2(Graph* graph, Node** from, Node** to, EdgeData* data, size_t* count) {
  std::vector<Node*> froms, tos;
  std::vector<EdgeData> kinds;
  for (auto& edge : graph->edges) {
    froms.push_back(edge.from);
    tos.push_back(edge.to);
    kinds.push_back(edge.data);
  }
  size_t size = *count;
  hand_out(froms, from, &(*count = size));
  hand_out(tos, to, &(*count = size));
  return hand_out(kinds, data, &(*count = size));
}

// -- changing edges -------------------------------------------------------------------------------------------

int cuGraphAddDependencies_v2(Graph* graph, Node* const* from, Node* const* to, const EdgeData* data, size_t count) {
  for (size_t i = 0; i < count; i++) {
    Edge edge{from[i], to[i], data ? data[i] : EdgeData{}};
    if (!allowed(*graph, edge) || graph->find(from[i], to[i]) != graph->edges.end()) return kInvalid;
    graph->edges.push_back(edge);
  }
  return kFine;
}
int cuGraphRemoveDependencies_v2(Graph* graph, Node* const* from, Node* const* to, const EdgeData* data,
                                 size_t count) {
  for (size_t i = 0; i < count; i++) {
    auto found = graph->find(from[i], to[i]);
    if (found == graph->edges.end() || !(found->data == (data ? data[i] : EdgeData{}))) return kInvalid;
    graph->edges.erase(found);
  }
  return kFine;
}
#endif

int cuGetErrorString(int, const char** text) {
  *text = "the driver said no";
  return kFine;
}

// -- what there is beside: looked up, never called here -------------------------------------------------------

int cuGraphAddDependencies() { return kUnsupported; }
int cuGraphInstantiateWithFlags() { return kUnsupported; }
int cuGraphUpload() { return kUnsupported; }
int cuGraphLaunch() { return kUnsupported; }
int cuGraphExecDestroy() { return kUnsupported; }
int cuMemcpyAsync() { return kUnsupported; }
int cuMemHostAlloc() { return kUnsupported; }
int cuMemFreeHost() { return kUnsupported; }
int cuEventCreate() { return kUnsupported; }
int cuEventRecord() { return kUnsupported; }
int cuEventSynchronize() { return kUnsupported; }
int cuEventDestroy_v2() { return kUnsupported; }
int cuEventElapsedTime() { return kUnsupported; }
int cuStreamCreate() { return kUnsupported; }
int cuStreamSynchronize() { return kUnsupported; }
int cuStreamDestroy_v2() { return kUnsupported; }

// -- for the test alone ---------------------------------------------------------------------------------------

int test_add_kernel(Node** made, Graph* graph, const char* name) {
  static std::map<std::string, std::unique_ptr<Function>> functions;
  auto& function = functions[name];
  if (!function) function = std::make_unique<Function>(Function{name});
  *made = graph->add(kKernel);
  (*made)->kernel.function = function.get();
  return kFine;
}
// A node of another type than a kernel or a graph.
int test_add_other(Node** made, Graph* graph, int type) {
  *made = graph->add(type);
  return kFine;
}
}
