"""CUDA source of a decode step's experts: routing, products of each expert with its rows, combination.

    route     a warp per row: softmax over the experts, the C largest one after another, their weights
    experts   grid (output tiles, experts). A block finds the rows that chose its expert among all B * C choices,
              ends at once when there are none, and multiplies them in tiles of eight, as
              ``products/small_rows_source.py`` does, MT tiles at a time. So an expert's weights are read once for
              up to 8 MT rows
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

# Constants: T, E experts, MT tiles of 8 rows, NT tiles of 16 outputs, W warps, DEEP chunks loaded at once, EPS
# (bits of a float). Defined or not: PACKED (then also BITS, GROUP and WHOLE); GATE with NORM or without; without
# GATE it is the down product. At most 1024 pairs.
# Inputs with GATE: x [B, ...] with K values a row, w and up [E, N, K], chosen [B, C] int32, with NORM norm [K].
# Output: y [B * C, N] of T: SiLU(gate) * up of each pair.
# Inputs without: x [B * C, K], w [E, N, K], chosen, weights [B, C] float32. Output: y [B * C, N] float32,
# weighted.
# With PACKED, w and up are words [E, N, K * BITS / 32], each followed by its scales and biases [E, N, K / GROUP]:
# w_scales, w_biases, up_scales, up_biases.
EXPERTS = """
  NEXT_MAY_START();
  WAIT_FOR_EARLIER();
  __shared__ float sums[W / 2][NT * MT * 128];
  __shared__ float row_squares[W][MT * 8];
  __shared__ float factors[MT * 8];
  __shared__ unsigned short members[1024];
  __shared__ int count;
  __shared__ int earlier;
  const int N = w_shape[1];
  const int C = chosen_shape[1];
  const int pairs = chosen_shape[0] * C;
  const bool by_pair = gridDim.y != E;
  const int expert = by_pair ? chosen[blockIdx.y] : int(blockIdx.y);
  int found = 1;
  if (pairs == C && by_pair) {
    if (threadIdx.x == 0) members[0] = blockIdx.y;  // a row's choices differ
    __syncthreads();
  } else {
    if (threadIdx.x == 0) count = earlier = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += W * 32) {
      if (chosen[i] != expert) continue;
      members[atomicAdd(&count, 1)] = i;
      if (by_pair && i < int(blockIdx.y)) earlier = 1;
    }
    __syncthreads();
    if (count == 0 || earlier != 0) return;
    found = count;
  }
  const int warp = threadIdx.x / 32;
  const int g = threadIdx.x % 32 / 4;
#ifdef GATE
  constexpr int OWN = NT / 2;
#else
  constexpr int OWN = NT;
#endif
#ifdef PACKED
  const int K = w_shape[2] / BITS * 32;
  const unsigned* matrices[NT];
  const unsigned short* tile_scales[NT];
  const unsigned short* tile_biases[NT];
  const int lane_first = 0;
#else
  const int K = w_shape[2];
  const T* matrices[NT];
  const int lane_first = threadIdx.x % 4 * 8;
#endif
#ifdef NORM
  constexpr bool NORMED = true;
  const T* gains = norm + lane_first;
#else
  constexpr bool NORMED = false;
  const T* gains = x;
#endif
  const int first = blockIdx.x * OWN * 16;
  for (int n = 0; n < NT; ++n) {
    const size_t row = size_t(expert) * N + first + n % OWN * 16 + g;
#ifdef GATE
    const bool gate_part = n < OWN;
    matrices[n] = (gate_part ? w : up) + row * w_shape[2] + lane_first;
#else
    matrices[n] = w + row * w_shape[2] + lane_first;
#endif
#ifdef PACKED
#ifdef GATE
    const T* scales = gate_part ? w_scales : up_scales;
    const T* biases = gate_part ? w_biases : up_biases;
#else
    const T* scales = w_scales;
    const T* biases = w_biases;
#endif
    tile_scales[n] = reinterpret_cast<const unsigned short*>(scales) + row * (K / GROUP);
    tile_biases[n] = reinterpret_cast<const unsigned short*>(biases) + row * (K / GROUP);
#endif
  }
  for (int tile = 0; tile < found; tile += MT * 8) {
    const int left = found - tile < MT * 8 ? found - tile : MT * 8;
    bool real[MT];
    const T* inputs[MT];
    for (int m = 0; m < MT; ++m) {
      real[m] = m * 8 + g < left;
      const int pair = members[real[m] ? tile + m * 8 + g : tile];
#ifdef GATE
      inputs[m] = x + size_t(pair / C) * K + lane_first;
#else
      inputs[m] = x + size_t(pair) * K + lane_first;
#endif
    }
    float total[NT][MT][4] = {};
    float squares[MT] = {};
#ifdef PACKED
    accumulate_packed<T, BITS, GROUP, WHOLE, W, MT, NT, NORMED, DEEP>(
        total, squares, matrices, tile_scales, tile_biases, inputs, real, gains, K, warp);
#else
    accumulate<T, MT, NT, NORMED, DEEP>(total, squares, matrices, inputs, real, gains, K, K / 32 * warp / W,
                                       K / 32 * (warp + 1) / W);
#endif
    gather<W, MT, NT, NORMED>(total, squares, sums, row_squares, factors, K, of_bits(EPS));
    for (int i = threadIdx.x; i < left * OWN * 16; i += W * 32) {
      const int m = i / (OWN * 16);
      const int n = i % (OWN * 16);
      const int to = members[tile + m];
      float sum = gathered<W, MT, NT>(sums, n / 16, n % 16, m);
      if (NORMED) sum *= factors[m];
#ifdef GATE
      float other = gathered<W, MT, NT>(sums, OWN + n / 16, n % 16, m);
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
