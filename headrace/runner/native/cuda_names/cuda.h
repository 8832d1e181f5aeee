// The names of CUDA's headers that MLX's own headers mention, so that step_graph.cpp can be built without CUDA's
// toolkit. Handles are pointers and stay opaque; nothing here is called.
#pragma once

struct CUgraph_st;
struct CUgraphExec_st;
struct CUgraphNode_st;
struct CUstream_st;
struct CUfunc_st;
struct CUmod_st;
struct CUmemPoolHandle_st;
struct CUDA_KERNEL_NODE_PARAMS_v2_st;

using CUgraphNode = CUgraphNode_st*;
using CUfunction = CUfunc_st*;
using CUmodule = CUmod_st*;
using CUDA_KERNEL_NODE_PARAMS = CUDA_KERNEL_NODE_PARAMS_v2_st;
using CUdeviceptr = unsigned long long;
enum CUresult : int {};
