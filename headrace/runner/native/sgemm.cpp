// cblas_sgemm for serving a model on a CPU, in front of a general BLAS ("base"). Three measured reasons:
//
// - A decode step multiplies a few rows by large weight matrices. A general BLAS copies a matrix into its own layout
//   first and so moves it through memory more than once. Here the rows are packed, and every weight is read once
//   from memory, ahead of its use, and multiplied into all rows.
// - The threads of a general BLAS wait for each other: when another process takes a core, every product takes a
//   scheduler's time slice. Here threads take pieces of the work from a counter; a helper that gets no core takes
//   no piece, and the caller computes it.
// - Each output of x · wᵀ is one chain of multiply-adds over k = 0, 1, 2, … whatever the number of rows, so that a
//   row's result does not depend on its neighbours, to the last bit.
//
// Other products, and those of more rows than headrace_sgemm_rows() allows, are cut into pieces, which base
// computes on one thread each.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>

#include <signal.h>

#include "cpu_vectors.h"

namespace {

using headrace::kLanes, headrace::kRegisters, headrace::Vector, headrace::Piece;
using headrace::load, headrace::save, headrace::scratch, headrace::transpose;

constexpr int kRowMajor = 101, kNoTrans = 111, kTrans = 112;  // CBLAS's constants

using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
Sgemm base = nullptr;

// A row-major product: c = alpha · op(a) · op(b) + beta · c, with m × k times k × n.
struct Product {
  int trans_a, trans_b, m, n, k;
  float alpha;
  const float* a;
  int lda;
  const float* b;
  int ldb;
  float beta;
  float* c;
  int ldc;
  float* packed = nullptr;  // a as in Bands
};

// -- sharing work ------------------------------------------------------------------------------------------

// The job in hand: the range 0…size, cut every `step`. Written by the caller, and only while no helper is inside;
// so the task itself may live on the caller's stack.
struct Job {
  const void* task;
  Piece piece;
  int size, step;
} job;

std::atomic<bool> taken{false};         // one job at a time; a second caller computes alone
std::atomic<bool> open{false};          // helpers may enter
std::atomic<int> inside{0};             // helpers that entered, or are about to see that it is not open
std::atomic<int> next_start{0};         // first index that nobody took
std::atomic<uint32_t> generation{0};    // counts jobs; helpers sleep on it
int helpers = 0;
int most_rows = 64;

// The next product comes some tens of microseconds after the last one, or some hundreds (an attention); to be
// woken takes as long. So a helper looks for work at first, then lets others have the core between looks, then
// sleeps.
constexpr int kSpins = 1000, kSpinsPerYield = 40;
constexpr std::chrono::microseconds kAwake{300};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void take_pieces() {
  for (int first; (first = next_start.fetch_add(job.step)) < job.size;)
    job.piece(job.task, first, std::min(first + job.step, job.size));
}

bool idle(uint32_t seen, int spins) {
  for (int i = 0; i < spins && generation.load(std::memory_order_relaxed) == seen; i++) relax();
  return generation.load(std::memory_order_relaxed) == seen;
}

void helper_main() {
  for (uint32_t seen = 0;;) {
    if (idle(seen, kSpins)) {
      const auto sleep_at = std::chrono::steady_clock::now() + kAwake;
      while (idle(seen, kSpinsPerYield) && std::chrono::steady_clock::now() < sleep_at) std::this_thread::yield();
    }
    generation.wait(seen);
    seen = generation.load();
    inside.fetch_add(1);  // before looking at `open`: the caller closes first and looks at `inside` then
    if (open.load()) take_pieces();
    inside.fetch_sub(1);
  }
}

void share(const void* task, Piece piece, int size, int step) {
  if (helpers == 0 || step >= size || taken.exchange(true)) {
    piece(task, 0, size);
    return;
  }
  job = {task, piece, size, step};
  next_start.store(0);
  open.store(true);
  generation.fetch_add(1);
  generation.notify_all();
  take_pieces();
  open.store(false);
  for (int i = 0; inside.load() != 0; i++) i < kSpins ? relax() : std::this_thread::yield();
  taken.store(false);
}

template <void (*Compute)(const Product&, int, int)>
void share(const Product& product, int size, int step) {
  share(
      &product, [](const void* task, int first, int last) { Compute(*static_cast<const Product*>(task), first, last); },
      size, step);
}

// -- x · wᵀ: c[m, n] = Σ_k a[m, k] · b[n, k], weights b with one output per line ---------------------------

constexpr int kMaxVectors = 4;          // of rows that are computed together: a band
constexpr int kBlock = 16;              // columns written together: a cache line of c
constexpr int kNearFloats = 96 * 1024;  // of bands that stay in a core's cache while weights pass by …
constexpr int kDepth = 2048;            // … of k, for which one band does so

// One link of an output's chain, fused where the vectors' links are (a compiler may turn a plain scalar loop into
// separate products and sums).
inline float link(float a, float b, float sum) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, sum);
#else
  return sum + a * b;
#endif
}

// Rows of a in bands of equal width, the last one perhaps narrower; a band is packed as [k][rows], its rows padded
// with zeros to whole vectors.
struct Bands {
  int vectors, count, last_vectors;
};

Bands bands_of(int m) {
  int vectors = (m + kLanes - 1) / kLanes;
  int count = (vectors + kMaxVectors - 1) / kMaxVectors;
  int each = (vectors + count - 1) / count;
  count = (vectors + each - 1) / each;
  return {each, count, vectors - (count - 1) * each};
}

// Packs k = first … last of all rows.
void pack(const Product& p, int first, int last) {
  Bands bands = bands_of(p.m);
  for (int band = 0; band < bands.count; band++) {
    int start = band * bands.vectors * kLanes;
    int width = (band + 1 < bands.count ? bands.vectors : bands.last_vectors) * kLanes;
    float* packed = p.packed + int64_t(start) * p.k;
    for (int column = 0; column < width; column += kLanes) {
      int rows = std::min(kLanes, p.m - start - column);
      const float* a = p.a + int64_t(start + column) * p.lda;
      float* to = packed + column;
      int k = first;
      for (; k + kLanes <= last; k += kLanes) {
        Vector square[kLanes] = {};
        for (int i = 0; i < rows; i++) square[i] = load(a + int64_t(i) * p.lda + k);
        transpose(square);
        for (int i = 0; i < kLanes; i++) save(to + int64_t(k + i) * width, square[i]);
      }
      for (; k < last; k++)
        for (int i = 0; i < kLanes; i++) to[int64_t(k) * width + i] = i < rows ? a[int64_t(i) * p.lda + k] : 0;
    }
  }
}

// A vector holds one k of many rows, and each weight is multiplied into a vector of sums.
template <int Vectors, int Columns, bool Ahead>
inline void panel(const float* packed, const float* weights, int64_t ldb, int depth, float* sums, bool more,
                  int64_t ahead) {
  Vector total[Columns][Vectors] = {};
  if (more)
    for (int j = 0; j < Columns; j++)
      for (int v = 0; v < Vectors; v++) total[j][v] = load(sums + (j * Vectors + v) * kLanes);
  const float* b[Columns];
  for (int j = 0; j < Columns; j++) b[j] = weights + j * ldb;
  const Vector* x = reinterpret_cast<const Vector*>(packed);
  int k = 0;
  for (; k + 16 <= depth; k += 16) {
    if (Ahead)
      for (int j = 0; j < Columns; j++) __builtin_prefetch(b[j] + k + ahead, 0, 2);
#pragma GCC unroll 4
    for (int i = k; i < k + 16; i++, x += Vectors)
      for (int j = 0; j < Columns; j++)
        for (int v = 0; v < Vectors; v++) total[j][v] += x[v] * b[j][i];
  }
  for (; k < depth; k++, x += Vectors)
    for (int j = 0; j < Columns; j++)
      for (int v = 0; v < Vectors; v++) total[j][v] += x[v] * b[j][k];
  for (int j = 0; j < Columns; j++)
    for (int v = 0; v < Vectors; v++) save(sums + (j * Vectors + v) * kLanes, total[j][v]);
}

inline void write(const Product& p, int row, int column, int count, Vector v) {
  float* c = p.c + int64_t(row) * p.ldc + column;
  if (count == kLanes && p.alpha == 1 && p.beta == 0) {
    save(c, v);
    return;
  }
  float sums[kLanes];
  std::memcpy(sums, &v, sizeof sums);
  for (int j = 0; j < count; j++) c[j] = p.beta == 0 ? p.alpha * sums[j] : p.alpha * sums[j] + p.beta * c[j];
}

// One band by up to kBlock columns.
template <int Vectors>
void block(const Product& p, int row, int column, int columns, bool ahead) {
  constexpr int kMost = (kRegisters - Vectors - 1) / Vectors;
  constexpr int kColumns = kMost >= 8 ? 8 : kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
  float sums[kBlock * Vectors * kLanes] __attribute__((aligned(64)));
  const float* packed = p.packed + int64_t(row) * p.k;
  const float* b = p.b + int64_t(column) * p.ldb;
  int64_t next = column + 2 * kBlock <= p.n ? kBlock * int64_t(p.ldb) : 0;
  for (int k = 0; k < p.k; k += kDepth, packed += kDepth * Vectors * kLanes, b += kDepth) {
    int depth = std::min(kDepth, p.k - k);
    int j = 0;
    for (; j + kColumns <= columns; j += kColumns) {
      float* to = sums + j * Vectors * kLanes;
      if (ahead)
        panel<Vectors, kColumns, true>(packed, b + j * int64_t(p.ldb), p.ldb, depth, to, k > 0, next);
      else
        panel<Vectors, kColumns, false>(packed, b + j * int64_t(p.ldb), p.ldb, depth, to, k > 0, 0);
    }
    for (; j < columns; j++) {
      float* to = sums + j * Vectors * kLanes;
      panel<Vectors, 1, false>(packed, b + j * int64_t(p.ldb), p.ldb, depth, to, k > 0, 0);
    }
  }
  for (int v = 0; v < Vectors; v++)
    for (int first = 0; first < columns; first += kLanes) {
      Vector square[kLanes] = {};
      for (int i = 0; i < kLanes && first + i < columns; i++)
        square[i] = load(sums + ((first + i) * Vectors + v) * kLanes);
      transpose(square);
      int rows = std::min(kLanes, p.m - row - v * kLanes);
      for (int i = 0; i < rows; i++)
        write(p, row + v * kLanes + i, column + first, std::min(kLanes, columns - first), square[i]);
    }
}

using Block = void (*)(const Product&, int, int, int, bool);
constexpr Block kBlocks[kMaxVectors] = {block<1>, block<2>, block<3>, block<4>};

void many_rows(const Product& p, int first, int last) {
  Bands bands = bands_of(p.m);
  int width = bands.vectors * kLanes;
  int group = std::max(1, int(kNearFloats / (int64_t(width) * p.k)));
  for (int start = 0; start < bands.count; start += group)
    for (int column = first; column < last; column += kBlock)
      for (int band = start; band < std::min(start + group, bands.count); band++) {
        int vectors = band + 1 < bands.count ? bands.vectors : bands.last_vectors;
        kBlocks[vectors - 1](p, band * width, column, std::min(kBlock, last - column), band == start);
      }
}

// One row: a vector holds the sums of many columns. Weights are turned in registers, so that the chain of
// multiply-adds of each output is the one that panel() makes.
void one_row(const Product& p, int first, int last) {
  int column = first;
  for (; column + kLanes <= last; column += kLanes) {
    const float* b = p.b + int64_t(column) * p.ldb;
    int64_t next = column + 2 * kLanes <= p.n ? kLanes * int64_t(p.ldb) : 0;
    Vector total = {};
    int k = 0;
    for (; k + kLanes <= p.k; k += kLanes) {
      Vector w[kLanes];
      for (int j = 0; j < kLanes; j++) w[j] = load(b + int64_t(j) * p.ldb + k);
      for (int j = 0; j < kLanes; j++) __builtin_prefetch(b + int64_t(j) * p.ldb + k + next, 0, 2);
      transpose(w);
      for (int i = 0; i < kLanes; i++) total += w[i] * p.a[k + i];
    }
    float sums[kLanes];
    for (int j = 0; j < kLanes; j++) {
      sums[j] = total[j];
      for (int t = k; t < p.k; t++) sums[j] = link(p.a[t], b[int64_t(j) * p.ldb + t], sums[j]);
    }
    write(p, 0, column, kLanes, load(sums));
  }
  for (; column < last; column++) {
    const float* b = p.b + int64_t(column) * p.ldb;
    Vector sum = {};
    for (int k = 0; k < p.k; k++) sum[0] = link(p.a[k], b[k], sum[0]);
    write(p, 0, column, 1, sum);
  }
}

// -- everything else: pieces for base ----------------------------------------------------------------------

void base_columns(const Product& p, int first, int last) {
  const float* b = p.b + (p.trans_b == kNoTrans ? int64_t(first) : int64_t(first) * p.ldb);
  base(kRowMajor, p.trans_a, p.trans_b, p.m, last - first, p.k, p.alpha, p.a, p.lda, b, p.ldb, p.beta, p.c + first,
       p.ldc);
}

void base_rows(const Product& p, int first, int last) {
  const float* a = p.a + (p.trans_a == kNoTrans ? int64_t(first) * p.lda : int64_t(first));
  base(kRowMajor, p.trans_a, p.trans_b, last - first, p.n, p.k, p.alpha, a, p.lda, p.b, p.ldb, p.beta,
       p.c + int64_t(first) * p.ldc, p.ldc);
}

// Sizes of pieces: long enough to be worth taking, many enough to even out, and whole cache lines of c.
constexpr int kAlign = 32;
constexpr int64_t kPieceProduct = 750'000;
constexpr int64_t kPackedFloats = 64 * 1024;
constexpr int64_t kSerialProduct = 2'000'000;

// Up to 16 rows take the same time, two of them or more; one takes half of that.
int columns_step(const Product& p) {
  int threads = helpers + 1;
  int64_t product = int64_t(p.n) * p.k * (p.m == 1 ? 8 : std::max(p.m, 16));
  int64_t pieces = std::clamp<int64_t>(product / kPieceProduct, 1, 4 * threads);
  if (pieces >= threads) pieces = (pieces + threads - 1) / threads * threads;
  return int((p.n + pieces * kBlock - 1) / (pieces * kBlock) * kBlock);
}

int pack_step(const Product& p, int width) {
  if (int64_t(width) * p.k < kPackedFloats) return p.k;
  int pieces = 2 * (helpers + 1);
  return (p.k + pieces * kLanes - 1) / (pieces * kLanes) * kLanes;
}

void by_weights(Product& p) {
  if (p.m == 1) {
    share<one_row>(p, p.n, columns_step(p));
    return;
  }
  int width = (p.m + kLanes - 1) / kLanes * kLanes;
  p.packed = scratch(size_t(width) * p.k);
  share<pack>(p, p.k, pack_step(p, width));
  share<many_rows>(p, p.n, columns_step(p));
}

int base_step(int size) {
  int even = (size + 4 * (helpers + 1) - 1) / (4 * (helpers + 1));
  return std::max(64, (even + kAlign - 1) / kAlign * kAlign);
}

}  // namespace

extern "C" {

// Must be called once, before the first product: the BLAS behind this one, and the number of threads.
void headrace_sgemm_start(Sgemm sgemm, int threads) {
  base = sgemm;
  sigset_t all, before;  // signals are for the threads that Python knows
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (; helpers < threads - 1; helpers++) std::thread(helper_main).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// For other native code of the process, so that its work is done by the same threads: calls piece(task, first, last)
// for the whole range 0…size, cut every `step`, and returns when all of it is done. Any part, or all, may run on the
// calling thread.
void headrace_parallel(const void* task, void (*piece)(const void*, int, int), int size, int step) {
  if (size > 0) share(task, piece, size, std::max(step, 1));
}

// Threads that may take part, the caller's included.
int headrace_threads() { return helpers + 1; }

// Products x · wᵀ of more rows are left to base. May be called between products.
void headrace_sgemm_rows(int most) { most_rows = most; }

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                 const float* b, int ldb, float beta, float* c, int ldc) {
  if (order != kRowMajor) {  // column-major: the transposes are row-major, with the factors swapped
    std::swap(trans_a, trans_b);
    std::swap(m, n);
    std::swap(a, b);
    std::swap(lda, ldb);
  }
  Product p{trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc};
  if (m < 1 || n < 1) return;
  if (m <= most_rows && k > 0 && trans_a == kNoTrans && trans_b == kTrans) {
    by_weights(p);
  } else if (int64_t(m) * n * k < kSerialProduct) {
    base_rows(p, 0, m);
  } else if (n >= m) {
    share<base_columns>(p, n, base_step(n));
  } else {
    share<base_rows>(p, m, base_step(m));
  }
}

}  // extern "C"
