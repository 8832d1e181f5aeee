// cblas_sgemm for serving a model on a CPU, in front of a general BLAS ("base"). Two measured reasons:
//
// - A decode step multiplies a few rows by large weight matrices. A general BLAS copies a matrix into its own layout
//   first and so moves it through memory more than once. Here every weight is read once, against all rows.
// - The threads of a general BLAS wait for each other: when another process takes a core, every product takes a
//   scheduler's time slice. Here threads take pieces of the work from a counter; a helper that gets no core takes
//   no piece, and the caller computes it.
//
// Each output of a product of up to kMaxRows rows is one chain of multiply-adds over k = 0, 1, 2, … whatever the
// number of rows, so a row's result does not depend on its neighbours, to the last bit.
//
// All other products are cut into pieces, which base computes on one thread each.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include <signal.h>

namespace {

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
  const float* packed_a = nullptr;  // a as [k][rows], rows padded to whole vectors
};

// -- sharing work ------------------------------------------------------------------------------------------

using Piece = void (*)(const Product&, int first, int last);

// The job in hand: the range 0…size, cut every `step`. Written by the caller, and only while no helper is inside.
struct Job {
  Product product;
  Piece piece;
  int size, step;
} job;

std::atomic<bool> taken{false};         // one job at a time; a second caller computes alone
std::atomic<bool> open{false};          // helpers may enter
std::atomic<int> inside{0};             // helpers that entered, or are about to see that it is not open
std::atomic<int> next_start{0};         // first index that nobody took
std::atomic<uint32_t> generation{0};    // counts jobs; helpers sleep on it
int helpers = 0;

constexpr int kSpins = 1000;  // looks for work before a helper sleeps: some tens of microseconds

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void take_pieces() {
  for (int first; (first = next_start.fetch_add(job.step)) < job.size;)
    job.piece(job.product, first, std::min(first + job.step, job.size));
}

void helper_main() {
  for (uint32_t seen = 0;;) {
    for (int i = 0; i < kSpins && generation.load(std::memory_order_relaxed) == seen; i++) relax();
    generation.wait(seen);
    seen = generation.load();
    inside.fetch_add(1);  // before looking at `open`: the caller closes first and looks at `inside` then
    if (open.load()) take_pieces();
    inside.fetch_sub(1);
  }
}

void share(const Product& product, Piece piece, int size, int step) {
  if (helpers == 0 || step >= size || taken.exchange(true)) {
    piece(product, 0, size);
    return;
  }
  job = {product, piece, size, step};
  next_start.store(0);
  open.store(true);
  generation.fetch_add(1);
  generation.notify_all();
  take_pieces();
  open.store(false);
  for (int i = 0; inside.load() != 0; i++) i < kSpins ? relax() : std::this_thread::yield();
  taken.store(false);
}

// -- few rows: c[m, n] = Σ_k a[m, k] · b[n, k] -------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif
constexpr int kMaxRows = 32;
constexpr int kMaxVectors = kMaxRows / kLanes;

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Indices __attribute__((vector_size(4 * kLanes)));

inline void store(const Product& p, int row, int column, float sum) {
  float* c = p.c + int64_t(row) * p.ldc + column;
  *c = p.beta == 0 ? p.alpha * sum : p.alpha * sum + p.beta * *c;
}

// One link of an output's chain, fused where the vectors' links are (a compiler may turn a plain scalar loop into
// separate products and sums).
inline float link(float a, float b, float sum) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, sum);
#else
  return sum + a * b;
#endif
}

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};

// a in the layout of Product::packed_a, in memory of the calling thread that lives until its next product.
const float* pack_rows(const Product& p, int width) {
  thread_local std::unique_ptr<float, Free> memory;
  thread_local size_t capacity = 0;
  size_t needed = size_t(p.k) * width;
  if (needed > capacity) {
    memory.reset(static_cast<float*>(std::aligned_alloc(64, (4 * needed + 63) / 64 * 64)));
    if (!memory) std::abort();
    capacity = needed;
  }
  float* x = memory.get();
  if (p.m < width) std::memset(x, 0, 4 * needed);
  for (int k = 0; k < p.k; k++, x += width)
    for (int row = 0; row < p.m; row++) x[row] = p.a[int64_t(row) * p.lda + k];
  return memory.get();
}

// Two rows or more: a vector holds one k of many rows, and each weight is multiplied into a vector of sums.
template <int Vectors, int Columns>
inline void panel(const Product& p, int column) {
  Vector total[Columns][Vectors] = {};
  const float* b[Columns];
  for (int j = 0; j < Columns; j++) b[j] = p.b + int64_t(column + j) * p.ldb;
  const Vector* x = reinterpret_cast<const Vector*>(p.packed_a);
#pragma GCC unroll 4
  for (int k = 0; k < p.k; k++, x += Vectors)
    for (int j = 0; j < Columns; j++)
      for (int v = 0; v < Vectors; v++) total[j][v] += x[v] * b[j][k];
  for (int j = 0; j < Columns; j++) {
    float sums[Vectors * kLanes];
    std::memcpy(sums, total[j], sizeof sums);
    for (int row = 0; row < p.m; row++) store(p, row, column + j, sums[row]);
  }
}

template <int Vectors>
void few_rows(const Product& p, int first, int last) {
  // As many columns as there are registers for their sums; eight hide the latency of a multiply-add.
  constexpr int kColumns = std::clamp((kRegisters - Vectors - 2) / Vectors, 1, 8);
  int column = first;
  for (; column + kColumns <= last; column += kColumns) panel<Vectors, kColumns>(p, column);
  for (; column < last; column++) panel<Vectors, 1>(p, column);
}

template <int... V>
Piece few_rows_of(int vectors, std::integer_sequence<int, V...>) {
  static constexpr Piece pieces[] = {few_rows<V + 1>...};
  return pieces[vectors - 1];
}

// Transposes a square of floats: at every stride (1, 2, 4 …) pairs of rows swap blocks of that width.
template <int Stride, int... J>
inline void swap_blocks(Vector& low, Vector& high, std::integer_sequence<int, J...>) {
  constexpr int N = kLanes;
  const Indices lower = {(J & Stride ? N + J - Stride : J)...};
  const Indices upper = {(J & Stride ? N + J : J + Stride)...};
  Vector a = low, b = high;
  low = __builtin_shuffle(a, b, lower);
  high = __builtin_shuffle(a, b, upper);
}

template <int Stride = 1>
inline void transpose(Vector (&square)[kLanes]) {
  if constexpr (Stride < kLanes) {
    for (int i = 0; i < kLanes; i++)
      if (!(i & Stride))
        swap_blocks<Stride>(square[i], square[i + Stride], std::make_integer_sequence<int, kLanes>{});
    transpose<2 * Stride>(square);
  }
}

// One row: a vector holds the sums of many columns. Weights are turned in registers, so that the chain of
// multiply-adds of each output is the one that panel() makes.
void one_row(const Product& p, int first, int last) {
  int column = first;
  for (; column + kLanes <= last; column += kLanes) {
    const float* b = p.b + int64_t(column) * p.ldb;
    Vector total = {};
    int k = 0;
    for (; k + kLanes <= p.k; k += kLanes) {
      Vector w[kLanes];
      for (int j = 0; j < kLanes; j++) w[j] = *reinterpret_cast<const Unaligned*>(b + int64_t(j) * p.ldb + k);
      transpose(w);
      for (int i = 0; i < kLanes; i++) total += w[i] * p.a[k + i];
    }
    for (int j = 0; j < kLanes; j++) {
      float sum = total[j];
      for (int t = k; t < p.k; t++) sum = link(p.a[t], b[int64_t(j) * p.ldb + t], sum);
      store(p, 0, column + j, sum);
    }
  }
  for (; column < last; column++) {
    const float* b = p.b + int64_t(column) * p.ldb;
    float sum = 0;
    for (int k = 0; k < p.k; k++) sum = link(p.a[k], b[k], sum);
    store(p, 0, column, sum);
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
constexpr int64_t kPieceFloats = 48 * 1024;
constexpr int64_t kSerialProduct = 2'000'000;

int few_rows_step(const Product& p, int vectors) {
  int64_t even = (p.n + 4 * (helpers + 1) - 1) / (4 * (helpers + 1));
  int64_t long_enough = kPieceFloats / (int64_t(p.k) * vectors + 1);
  return int(std::max(even, long_enough) / kAlign * kAlign + kAlign);
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
  if (m <= kMaxRows && k > 0 && trans_a == kNoTrans && trans_b == kTrans) {
    int vectors = (m + kLanes - 1) / kLanes;
    if (m > 1) p.packed_a = pack_rows(p, vectors * kLanes);
    Piece piece = m == 1 ? one_row : few_rows_of(vectors, std::make_integer_sequence<int, kMaxVectors>{});
    share(p, piece, n, few_rows_step(p, vectors));
  } else if (int64_t(m) * n * k < kSerialProduct) {
    base_rows(p, 0, m);
  } else if (n >= m) {
    share(p, base_columns, n, base_step(n));
  } else {
    share(p, base_rows, m, base_step(m));
  }
}

}  // extern "C"
