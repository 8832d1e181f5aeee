"""Source of the sampling kernels (``kernel.py``), for CUDA and for Metal.

    strips   one warp per strip of 256 tokens: the largest logit and, where a row asks for it, the sum of
             exponentials and the best of logit plus noise; no barriers
    choice   one block per row over the strips' results. A greedy row and one without truncation end here

A row with truncation goes on by rejection. The token of the best noisy logit is the row's if truncation keeps it,
and to know that takes one pass: the mass above it. If it is not kept, nothing at or below its logit is, so the
best noisy logit above it is next. The first is rejected with a probability of at most ``1 - top_p``, so one pass
is mostly enough, and the row is never sorted. The result is the definition's: the argmax over what is kept.

With ``top_k`` the k-th largest logit is found first. The k-th largest of the strips' maxima is no larger than it;
so the few tokens from there on are collected, sorted by value, and all further passes go over them. Where these
are too many (or k is larger than the number of strips) the value is found by bisection over the whole row.

Mass is summed in fixed point, shares of the largest probability in units of 2**-40: integers, so that the order of
sums cannot show, and what a row gives depends on its logits and parameters only. Where a border falls is therefore
exact up to the rounding of exponentials (some 1e-7 of the mass). The strips' own sums, from which the whole mass
comes, are of fixed strips in a fixed order.

The Metal names have not been run on Metal, and nothing uses them yet.
"""

from __future__ import annotations

STRIP = 256
# Words of a row's parameters, see ``kernel.py``.
WORDS = 8
# Results of a strip, each [strips] of a row: largest logit (infinite where there is a NaN), its token, sum, best
# noisy logit, its token.
RESULTS = 5
# Tokens that can be collected; so many strips at most.
COLLECTED = 2048

CUDA_SAMPLING_NAMES = """
#define FUNCTION __device__ __forceinline__
#define APART __device__ __noinline__
#define IN_SHARED(type) type
#define IN_DEVICE(type) type
#define SHARED_COUNTER(name) __shared__ int name
#define COUNT(name) atomicAdd(&name, 1)
#define COUNTED(name) name
#define UNCOUNTED(name) name = 0
#define WORD_OF(x) __float_as_uint(x)
#define FLOAT_OF(x) __uint_as_float(x)
#define EXP(x) expf(x)
#define LOG(x) logf(x)
#define NO_FLOAT __uint_as_float(0x7fc00000u)
#define LEAST __uint_as_float(0xff800000u)
"""

METAL_SAMPLING_NAMES = """
#define FUNCTION inline
#define APART inline
#define IN_SHARED(type) threadgroup type
#define IN_DEVICE(type) device type
#define SHARED_COUNTER(name) threadgroup metal::atomic_int name
#define COUNT(name) metal::atomic_fetch_add_explicit(&name, 1, metal::memory_order_relaxed)
#define COUNTED(name) metal::atomic_load_explicit(&name, metal::memory_order_relaxed)
#define UNCOUNTED(name) metal::atomic_store_explicit(&name, 0, metal::memory_order_relaxed)
#define WORD_OF(x) as_type<unsigned>(x)
#define FLOAT_OF(x) as_type<float>(x)
#define EXP(x) metal::precise::exp(x)
#define LOG(x) metal::precise::log(x)
#define NO_FLOAT as_type<float>(0x7fc00000u)
#define LEAST as_type<float>(0xff800000u)
"""

FUNCTIONS = """
// Seen of tokens: how many, their mass, the best value and its token (the smaller one among equals).
struct Seen {
  int count;
  unsigned long mass;
  float best;
  unsigned token;
};
FUNCTION Seen nothing_seen() {
  Seen seen;
  seen.count = 0;
  seen.mass = 0;
  seen.best = LEAST;
  seen.token = 0x7fffffffu;
  return seen;
}
FUNCTION Seen with_value(Seen seen, float value, unsigned token) {
  if (value > seen.best || (value == seen.best && token < seen.token)) {
    seen.best = value;
    seen.token = token;
  }
  return seen;
}
FUNCTION Seen best_of_warp(Seen seen) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const float best = SHUFFLE_XOR(seen.best, mask);
    const unsigned token = SHUFFLE_XOR(seen.token, mask);
    seen = with_value(seen, best, token);
  }
  return seen;
}
FUNCTION Seen over_warp(Seen seen) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const unsigned low = SHUFFLE_XOR(unsigned(seen.mass), mask);
    const unsigned high = SHUFFLE_XOR(unsigned(seen.mass >> 32), mask);
    const float best = SHUFFLE_XOR(seen.best, mask);
    const unsigned token = SHUFFLE_XOR(seen.token, mask);
    seen.count += SHUFFLE_XOR(seen.count, mask);
    seen.mass += (unsigned long)(high) << 32 | (unsigned long)(low);
    seen = with_value(seen, best, token);
  }
  return seen;
}
// Of the whole block; slots [32 * 5].
FUNCTION Seen over_block(Seen seen, IN_SHARED(unsigned)* slots, int thread, int warps) {
  seen = over_warp(seen);
  BARRIER();
  const int lane = thread % 32;
  if (lane == 0) {
    IN_SHARED(unsigned)* own = slots + thread / 32 * 5;
    own[0] = unsigned(seen.count);
    own[1] = unsigned(seen.mass);
    own[2] = unsigned(seen.mass >> 32);
    own[3] = WORD_OF(seen.best);
    own[4] = seen.token;
  }
  BARRIER();
  seen = nothing_seen();
  if (lane < warps) {
    IN_SHARED(const unsigned)* own = slots + lane * 5;
    seen.count = int(own[0]);
    seen.mass = (unsigned long)(own[2]) << 32 | (unsigned long)(own[1]);
    seen.best = FLOAT_OF(own[3]);
    seen.token = own[4];
  }
  return over_warp(seen);
}

// Gumbel noise: sampler.py's gumbel_argmax.
FUNCTION float noisy(float scaled, unsigned token, unsigned add, unsigned multiply) {
  unsigned x = token * multiply + add;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  x = x ^ (x >> 16);
  const float uniform = float(x >> 9) * 1.1920928955078125e-7f + 5.9604644775390625e-8f;
  return scaled - LOG(-LOG(uniform));
}
FUNCTION unsigned long fixed_point(float share) { return (unsigned long)(share * 1099511627776.0f); }

// Unsigned integers in the order of floats; both zeros are one.
FUNCTION unsigned order_of(float x) {
  const unsigned word = x == 0.0f ? 0u : WORD_OF(x);
  return word >> 31 ? ~word : word | 0x80000000u;
}
FUNCTION float of_order(unsigned order) {
  return FLOAT_OF(order >> 31 ? order & 0x7fffffffu : ~order);
}

// Sort the first n values (a power of two), the largest first.
APART void sort_block(IN_SHARED(unsigned)* values, int n, int thread, int threads) {
  for (int run = 2; run <= n; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      BARRIER();
      for (int pair = thread; pair < n / 2; pair += threads) {
        const int i = pair / step * step * 2 + pair % step;
        const bool ascending = (i & run) != 0;
        const unsigned first = values[i], second = values[i + step];
        if ((first < second) != ascending) {
          values[i] = second;
          values[i + step] = first;
        }
      }
    }
  }
  BARRIER();
}

// What truncation asks, and what is known of the row.
struct Row {
  float temperature, top, low;  // top: the largest scaled logit; low: log(min_p)
  unsigned add, multiply;
};
// No logit below this one has a scaled logit of at least `scaled`; saves dividing those.
FUNCTION float floor_of(float scaled, float temperature) {
  const float x = scaled * temperature;
  return x - (x < 0.0f ? -x : x) * 1e-6f - 1e-30f;
}
// The token added to what is seen, if its scaled logit is above `above`, or equal where `equal`. Count and mass
// are of those above.
FUNCTION Seen with_token(Seen seen, float scaled, unsigned token, Row row, float above, bool equal, bool noise) {
  const bool counts = scaled > above;
  if ((counts || (equal && scaled == above)) && scaled - row.top >= row.low) {
    if (counts) {
      seen.count += 1;
      seen.mass += fixed_point(EXP(scaled - row.top));
    }
    if (noise) seen = with_value(seen, noisy(scaled, token, row.add, row.multiply), token);
  }
  return seen;
}
// All tokens of the row, if collected < 0, else those collected; values are scaled logits.
template <typename T>
APART Seen look(IN_DEVICE(const T)* logits, int vocab, IN_SHARED(const float)* values,
                   IN_SHARED(const unsigned)* tokens, int collected, Row row, float above, bool equal, bool noise,
                   IN_SHARED(unsigned)* slots, int thread, int threads) {
  Seen seen = nothing_seen();
  if (collected >= 0) {
    for (int i = thread; i < collected; i += threads) {
      seen = with_token(seen, values[i], tokens[i], row, above, equal, noise);
    }
    return over_block(seen, slots, thread, threads / 32);
  }
  const float least = floor_of(above, row.temperature);
  for (int first = thread; first < vocab; first += threads * 8) {
    float x[8];
    for (int i = 0; i < 8; ++i) {
      const int token = first + i * threads;
      x[i] = token < vocab ? float(logits[token]) : NO_FLOAT;
    }
    for (int i = 0; i < 8; ++i) {
      if (x[i] >= least) {
        const unsigned token = unsigned(first + i * threads);
        seen = with_token(seen, x[i] / row.temperature, token, row, above, equal, noise);
      }
    }
  }
  return over_block(seen, slots, thread, threads / 32);
}
// The k-th largest scaled logit of the whole row. Two bits of its order per pass.
template <typename T>
APART float kth_largest(IN_DEVICE(const T)* logits, int vocab, int k, float temperature,
                           IN_SHARED(unsigned)* slots, int thread, int threads) {
  unsigned found = 0;
  for (int bit = 30; bit >= 0; bit -= 2) {
    Seen seen = nothing_seen();
    for (int token = thread; token < vocab; token += threads) {
      const unsigned order = order_of(float(logits[token]) / temperature);
      if (order >= found) {
        const unsigned digit = (order - found) >> bit;  // beyond 3: larger than all that is looked for
        if (digit >= 1) seen.mass += 1ul;
        if (digit >= 2) seen.mass += 1ul << 21;
        if (digit >= 3) seen.mass += 1ul << 42;
      }
    }
    seen = over_block(seen, slots, thread, threads / 32);
    unsigned digit = 0;
    for (unsigned i = 1; i <= 3; ++i) {
      if (int(seen.mass >> (21 * (i - 1)) & 0x1fffff) >= k) digit = i;
    }
    found += digit << bit;
  }
  return of_order(found);
}
"""

# Constants: T, WARPS. Inputs: logits [R, V] of T, words [R, 8] uint32.
# Output: found [R, RESULTS, strips] uint32. Grid: blocks of WARPS strips, a warp each, by rows.
STRIPS_BODY = """
  const int V = int(logits_shape[1]);
  const int STRIPS = (V + 255) / 256;
  const int thread = int(thread_position_in_threadgroup.x);
  const int lane = thread % 32;
  const int strip = int(threadgroup_position_in_grid.x) * WARPS + thread / 32;
  const int row = int(threadgroup_position_in_grid.y);
  if (strip >= STRIPS) return;
  const unsigned mode = words[row * 8];
  IN_DEVICE(const T)* own = logits + long(row) * V;
  float x[8];
  Seen top = nothing_seen();
  for (int i = 0; i < 8; ++i) {
    const int token = strip * 256 + i * 32 + lane;
    x[i] = token < V ? float(own[token]) : LEAST;
  }
  for (int i = 0; i < 8; ++i) {
    if (x[i] != x[i]) x[i] = -LEAST;  // as bad as infinity
    top = with_value(top, x[i], unsigned(strip * 256 + i * 32 + lane));
  }
  top = best_of_warp(top);
  WRITABLE(unsigned)* to = found + long(row) * 5 * STRIPS + strip;
  if (lane == 0) {
    to[0] = WORD_OF(top.best);
    to[STRIPS] = top.token;
  }
  if (mode == 0 || mode == 3) return;
  const float temperature = FLOAT_OF(words[row * 8 + 1]);
  const unsigned add = words[row * 8 + 2], multiply = words[row * 8 + 3];
  const float largest = top.best / temperature;
  float sum = 0.0f;
  Seen drawn = nothing_seen();
  for (int i = 0; i < 8; ++i) {
    const float scaled = x[i] / temperature;
    const unsigned token = unsigned(strip * 256 + i * 32 + lane);
    drawn = with_value(drawn, noisy(scaled, token, add, multiply), token);
    if (mode == 2 && scaled > LEAST) sum += EXP(scaled - largest);
  }
  drawn = best_of_warp(drawn);
  for (int mask = 16; mask > 0; mask /= 2) sum += SHUFFLE_XOR(sum, mask);
  if (lane == 0) {
    to[2 * STRIPS] = WORD_OF(sum);
    to[3 * STRIPS] = WORD_OF(drawn.best);
    to[4 * STRIPS] = drawn.token;
  }
"""

# Constants: T, THREADS. Inputs: logits, words, found as above. Outputs: tokens [>= R] int32, finite
# [>= R] bool. Grid: a block of THREADS threads (whole warps, up to 32) per row.
CHOICE_BODY = """
  const int V = int(logits_shape[1]);
  const int STRIPS = (V + 255) / 256;
  SHARED unsigned slots[32 * 5];
  SHARED unsigned sorted[2048];
  SHARED float values[2048];
  SHARED unsigned ids[2048];
  SHARED_COUNTER(filled);
  const int thread = int(thread_position_in_threadgroup.x);
  const int place = int(threadgroup_position_in_grid.x);
  IN_DEVICE(const T)* own = logits + long(place) * V;
  IN_DEVICE(const unsigned)* asked = words + place * 8;
  IN_DEVICE(const unsigned)* strips = found + long(place) * 5 * STRIPS;
  const unsigned mode = asked[0];
  Seen seen = nothing_seen();
  for (int strip = thread; strip < STRIPS; strip += THREADS) {
    seen = with_value(seen, FLOAT_OF(strips[strip]), strips[STRIPS + strip]);
  }
  seen = over_block(seen, slots, thread, THREADS / 32);
  const bool good = seen.best - seen.best == 0.0f;  // neither infinity
  unsigned chosen = seen.token;
  Row row;
  row.temperature = FLOAT_OF(asked[1]);
  row.top = seen.best / row.temperature;
  // Where the division overflows, the largest logit is all there is.
  if (good && mode != 0 && row.top - row.top == 0.0f) {
    row.add = asked[2];
    row.multiply = asked[3];
    row.low = FLOAT_OF(asked[6]);
    const int k = int(asked[4]);
    const float top_p = FLOAT_OF(asked[5]);
    int collected = -1;  // the whole row
    unsigned long total = 0;
    bool restricted = false;
    float kth = LEAST;
    if (mode != 3) {
      seen = nothing_seen();
      for (int strip = thread; strip < STRIPS; strip += THREADS) {
        seen = with_value(seen, FLOAT_OF(strips[3 * STRIPS + strip]), strips[4 * STRIPS + strip]);
        if (mode == 2) {
          const float largest = FLOAT_OF(strips[strip]) / row.temperature;
          seen.mass += fixed_point(FLOAT_OF(strips[2 * STRIPS + strip]) * EXP(largest - row.top));
        }
      }
      seen = over_block(seen, slots, thread, THREADS / 32);
      chosen = seen.token;
      total = seen.mass;
      // A best one that min_p keeps is the best of those.
      restricted = mode == 2 && row.low > LEAST &&
        (top_p < 1.0f || !(float(own[chosen]) / row.temperature - row.top >= row.low));
    } else {
      restricted = true;
      if (k <= STRIPS) {
        int n = 1;
        while (n < STRIPS) n *= 2;
        for (int strip = thread; strip < n; strip += THREADS) {
          sorted[strip] = strip < STRIPS ? order_of(FLOAT_OF(strips[strip]) / row.temperature) : 0u;
        }
        if (thread == 0) UNCOUNTED(filled);
        sort_block(sorted, n, thread, THREADS);
        const float from = of_order(sorted[k - 1]);
        const float least = floor_of(from, row.temperature);
        BARRIER();
        for (int first = thread; first < V; first += THREADS * 8) {
          float x[8];
          for (int i = 0; i < 8; ++i) {
            const int token = first + i * THREADS;
            x[i] = token < V ? float(own[token]) : NO_FLOAT;
          }
          for (int i = 0; i < 8; ++i) {
            if (x[i] >= least && x[i] > LEAST) {
              const float scaled = x[i] / row.temperature;
              if (scaled >= from) {
                const int at = COUNT(filled);
                if (at < 2048) {
                  values[at] = scaled;
                  ids[at] = unsigned(first + i * THREADS);
                }
              }
            }
          }
        }
        BARRIER();
        const int count = COUNTED(filled);
        if (count <= 2048) {
          collected = count;
          n = 1;
          while (n < count) n *= 2;
          for (int i = thread; i < n; i += THREADS) sorted[i] = i < count ? order_of(values[i]) : 0u;
          sort_block(sorted, n, thread, THREADS);
          // Fewer than k: all others are banned.
          if (k <= count) kth = of_order(sorted[k - 1]);
        }
      }
      if (collected < 0) kth = kth_largest(own, V, k, row.temperature, slots, thread, THREADS);
    }
    if (restricted) {
      seen = look(own, V, values, ids, collected, row, kth, true, true, slots, thread, THREADS);
      chosen = seen.token;
      total = seen.mass;
      // Of equal logits at the k-th place only so many count.
      if (kth > LEAST && kth - row.top >= row.low) {
        total += (unsigned long)(k - seen.count) * fixed_point(EXP(kth - row.top));
      }
    }
    if (top_p < 1.0f) {
      const unsigned long most = (unsigned long)(top_p * float(total));
      for (;;) {
        const float pivot = float(own[chosen]) / row.temperature;
        if (pivot == row.top) break;
        seen = look(own, V, values, ids, collected, row, pivot, false, false, slots, thread, THREADS);
        if (seen.mass < most) break;
        seen = look(own, V, values, ids, collected, row, pivot, false, true, slots, thread, THREADS);
        chosen = seen.token;
      }
    }
  }
  if (thread == 0) {
    tokens[place] = int(chosen);
    finite[place] = good;
  }
"""
