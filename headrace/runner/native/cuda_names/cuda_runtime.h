// See cuda.h beside this file.
#pragma once
#include "cuda.h"

using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraphExec_st*;
using cudaGraphNode_t = CUgraphNode_st*;
using cudaStream_t = CUstream_st*;
using cudaMemPool_t = CUmemPoolHandle_st*;
struct cudaKernelNodeParams;
enum cudaError_t : int {};

cudaError_t cudaGraphDestroy(cudaGraph_t);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t);
cudaError_t cudaStreamDestroy(cudaStream_t);

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
