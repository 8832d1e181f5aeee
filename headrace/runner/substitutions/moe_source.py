"""CUDA source of a decode step's experts: routing, products of each expert with its rows, combination.

    route     a warp per row: softmax over the experts, the C largest one after another, their weights
    experts   grid (output tiles, experts). A block finds the rows that chose its expert among all B * C choices,
              ends at once when there are none, and multiplies them eight at a time as ``small_rows_source.py``
              does. So an expert's weights are read once for all of its rows
    combine   a row's C results added up, and the residual

Where there are fewer choices than experts, the grid's second axis counts choices, and the first choice of an
expert stands for it. A *pair* is a row's choice: row * C + which.
"""

from __future__ import annotations

# Constants: T, E experts (at most 1024), C choices, NORMALIZE (weights of the chosen sum up to one), SCALE (bits
# of a float that multiplies the weights).
# Inputs: logits [B, E] of T. Outputs: chosen [B, C] int32, weights [B, C] float32. Grid: 32 threads per row.
ROUTE = """
  constexpr int PER = (E + 31) / 32;
  const int row = blockIdx.x;
  const int lane = threadIdx.x;
  float value[PER];
  float most = -1e30f;
  for (int i = 0; i < PER; ++i) {
    const int e = i * 32 + lane;
    value[i] = e < E ? float(logits[row * E + e]) : -1e30f;
    most = value[i] > most ? value[i] : most;
  }
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, most, mask);
    most = other > most ? other : most;
  }
  float sum = 0.0f;
  for (int i = 0; i < PER; ++i) {
    const bool real = i * 32 + lane < E;
    value[i] = real ? exponential(value[i] - most) : -1.0f;
    sum += real ? value[i] : 0.0f;
  }
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  float taken = 0.0f;
  float mine = 0.0f;
  int which = 0;
  for (int c = 0; c < C; ++c) {
    float best = -2.0f;
    int at = E;
    for (int i = 0; i < PER; ++i) {
      if (value[i] > best) {
        best = value[i];
        at = i * 32 + lane;
      }
    }
    for (int mask = 16; mask > 0; mask /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best, mask);
      const int place = __shfl_xor_sync(0xffffffffu, at, mask);
      if (other > best || (other == best && place < at)) {
        best = other;
        at = place;
      }
    }
    if (at >= E) at = c;  // nothing compares with values that are not numbers; the result will not be one either
    for (int i = 0; i < PER; ++i) {
      if (i * 32 + lane == at) value[i] = -1.0f;
    }
    taken += best;
    if (lane == c % 32) {
      mine = best;
      which = at;
    }
    if (c % 32 == 31 || c == C - 1) {
      const int index = c / 32 * 32 + lane;
      if (index <= c) {
        chosen[row * C + index] = which;
        weights[row * C + index] = mine;
      }
    }
  }
  for (int c = lane; c < C; c += 32) {
    weights[row * C + c] = weights[row * C + c] / (NORMALIZE ? taken : sum) * of_bits(SCALE);
  }
"""

# Constants: T, E experts, NT tiles of 16 outputs, W warps, DEEP chunks loaded at once, EPS (bits of a float).
# Defined or not: GATE with NORM or without; without GATE it is the down product.
# Inputs with GATE: x [B, ...] with K values a row, w and up [E, N, K], chosen [B, C] int32, with NORM norm [K].
# Output: y [B * C, N] of T: SiLU(gate) * up of each pair.
# Inputs without: x [B * C, K], w [E, N, K], chosen, weights [B, C] float32. Output: y [B * C, N] float32,
# weighted.
EXPERTS = """
  __shared__ float sums[W / 2][NT * 128];
  __shared__ float row_squares[W][8];
  __shared__ float factors[8];
  __shared__ int members[256];
  __shared__ int count;
  const int N = w_shape[1];
  const int K = w_shape[2];
  const int C = chosen_shape[1];
  const int pairs = chosen_shape[0] * C;
  const bool by_pair = gridDim.y != E;
  const int expert = by_pair ? chosen[blockIdx.y] : int(blockIdx.y);
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += W * 32) {
    if (chosen[i] == expert) members[atomicAdd(&count, 1)] = i;
  }
  __syncthreads();
  bool stands = count > 0;
  for (int i = 0; by_pair && i < count; ++i) stands = stands && members[i] >= int(blockIdx.y);
  if (!stands) return;
  const int warp = threadIdx.x / 32;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
#ifdef GATE
  constexpr int OWN = NT / 2;
#else
  constexpr int OWN = NT;
#endif
#ifdef NORM
  constexpr bool NORMED = true;
  const T* gains = norm + t * 8;
#else
  constexpr bool NORMED = false;
  const T* gains = x;
#endif
  const int first = blockIdx.x * OWN * 16;
  const T* matrices[NT];
  for (int n = 0; n < NT; ++n) {
#ifdef GATE
    const T* of = n < OWN ? w : up;
#else
    const T* of = w;
#endif
    matrices[n] = of + (size_t(expert) * N + first + n % OWN * 16 + g) * K + t * 8;
  }
  const int chunks = K / 32;
  for (int tile = 0; tile < count; tile += 8) {
    const int left = count - tile < 8 ? count - tile : 8;
    const bool real[1] = {g < left};
    const int pair = members[g < left ? tile + g : tile];
#ifdef GATE
    const T* inputs[1] = {x + size_t(pair / C) * K + t * 8};
#else
    const T* inputs[1] = {x + size_t(pair) * K + t * 8};
#endif
    float total[NT][1][4] = {};
    float squares[1] = {};
    accumulate<T, 1, NT, NORMED, DEEP>(total, squares, matrices, inputs, real, gains, K, chunks * warp / W,
                                       chunks * (warp + 1) / W);
    gather<W, 1, NT, NORMED>(total, squares, sums, row_squares, factors, K, of_bits(EPS));
    for (int i = threadIdx.x; i < left * OWN * 16; i += W * 32) {
      const int m = i / (OWN * 16);
      const int n = i % (OWN * 16);
      const int to = members[tile + m];
      float sum = gathered<W, 1, NT>(sums, n / 16, n % 16, m);
      if (NORMED) sum *= factors[m];
#ifdef GATE
      float other = gathered<W, 1, NT>(sums, OWN + n / 16, n % 16, m);
      if (NORMED) other *= factors[m];
      y[size_t(to) * N + first + n] = T(gate(sum, other));
#else
      y[size_t(to) * N + first + n] = sum * weights[to];
#endif
    }
    __syncthreads();
  }
"""

# Constants: T, C choices. Inputs: parts [B * C, N] float32, residual [B, ...] of T with N values a row.
# Output: y like residual. Grid: N threads by B.
COMBINE = """
  const int N = parts_shape[1];
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y;
  if (n >= N) return;
  float sum = float(residual[size_t(row) * N + n]);
  for (int c = 0; c < C; ++c) sum += parts[(size_t(row) * C + c) * N + n];
  y[size_t(row) * N + n] = T(sum);
"""
