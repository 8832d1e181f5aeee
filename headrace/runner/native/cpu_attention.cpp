// Attention of queries over their rows' contexts, read where they are in the pools.
//
// Work is cut into pieces of one row, one KV head and some of the row's queries: all queries that share the head
// are computed together. A context is walked through in tiles of kTile positions, and tiles in spans of kSpan, both
// cut at multiples of their size:
//
//     scores   keys of a tile are transposed to [dim][kTile], so that a vector holds one product of many positions
//     weights  online softmax: a tile with a greater score rescales what the span has
//     values   rows of values times weights, added to the span's sums
//     spans    their sums are merged in order, each relative to its own greatest score
//
// Where pieces are few (decode) the spans of a row are pieces too; to be merged in the same order. So every value
// is one sequence of roundings, which depends on its own row's length and window alone: not on its neighbours, on the
// number of queries in a forward, or on who computed what.

#include "cpu_attention.h"

#include <array>
#include <vector>

#include "cpu_vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {
namespace {

constexpr int kTile = 64, kSpan = 512;
constexpr float kHidden = -1e30f;
constexpr int kRows = 4;                               // queries in registers
constexpr int kVectors = kRegisters >= 32 ? 4 : 2;     // of positions, or of elements, in registers
constexpr int kPieceRows = 96;                         // queries of a piece: keys are transposed once for them
constexpr size_t kPartialFloats = size_t(4) << 20;     // of spans that wait to be merged: a line of the memory plan

// -- reading vectors -----------------------------------------------------------------------------------------

inline float from_bfloat16(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

inline float from_float16(uint16_t bits) {
#if defined(__FLT16_MAX__)
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return float(x);
#else
  uint32_t magnitude = bits & 0x7fffu, wide = magnitude << 13;
  float x;
  if (magnitude >= 0x7c00u) {
    wide |= 0x7f800000u;
    std::memcpy(&x, &wide, 4);
  } else {
    std::memcpy(&x, &wide, 4);
    x *= 5.192296858534828e33f;  // 2^112: the exponents' biases differ by that; right for subnormals too
  }
  return bits & 0x8000u ? -x : x;
#endif
}

// Which compilers do one by one.
void widen_float16(const uint16_t* from, int count, float* __restrict to) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + kLanes <= count; i += kLanes)
    save(to + i, Vector(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)))));
#elif defined(__F16C__)
  for (; i + kLanes <= count; i += kLanes)
    save(to + i, Vector(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)))));
#endif
  for (; i < count; i++) to[i] = from_float16(from[i]);
}

inline bool in_place(const Cache& cache) { return cache.element == Element::float32 && cache.dim % kLanes == 0; }

// kLanes codes of a packed vector. Through registers: a vector read right after a part of it was written waits.
inline Integers octets(const uint8_t* from) {
#if defined(__AVX512F__)
  return Integers(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return Integers(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Integers codes;
  for (int i = 0; i < kLanes; i++) codes[i] = from[i];
  return codes;
#endif
}

inline Integers nibbles(const uint8_t* from) {
  uint64_t codes = 0;
  std::memcpy(&codes, from, kLanes / 2);
  const Integers number = lane_numbers();
  Integers words = Integers{} + int32_t(codes);
  if constexpr (kLanes > 8) words = number < 8 ? words : Integers{} + int32_t(codes >> 32);
  return (words >> ((number & 7) * 4)) & 15;
}

inline float scale_of(const Cache& cache, uint16_t bits) {
  return cache.bfloat16_scales ? from_bfloat16(bits) : from_float16(bits);
}

template <int Bits>
void unpack_codes(const Cache& cache, int64_t index, float* __restrict to) {
  int groups = cache.groups;
  const uint8_t* codes = static_cast<const uint8_t*>(cache.data) + index * cache.width * Bits / 8;
  for (int group = 0; group < groups; group++) {
    float scale = scale_of(cache, cache.scales[index * groups + group]);
    float bias = scale_of(cache, cache.biases[index * groups + group]);
    for (int i = 0; i < cache.group_size; i += kLanes) {
      Integers some = Bits == 8 ? octets(codes + i) : nibbles(codes + i / 2);
      save(to + i, __builtin_convertvector(some, Vector) * scale + bias);
    }
    codes += cache.group_size * Bits / 8;
    to += cache.group_size;
  }
}

// One vector as float32; `to` has room for cache.width elements.
void unpack(const Cache& cache, int64_t index, float* __restrict to) {
  int width = cache.width;
  const uint16_t* halves = static_cast<const uint16_t*>(cache.data) + index * width;
  switch (cache.element) {
    case Element::float32:
      std::memcpy(to, static_cast<const float*>(cache.data) + index * width, 4 * size_t(width));
      break;
    case Element::bfloat16:
      for (int i = 0; i < width; i++) to[i] = from_bfloat16(halves[i]);
      break;
    case Element::float16:
      widen_float16(halves, width, to);
      break;
    case Element::packed8:
      unpack_codes<8>(cache, index, to);
      break;
    case Element::packed4:
      unpack_codes<4>(cache, index, to);
  }
}

int64_t bytes_of(const Cache& cache) {
  switch (cache.element) {
    case Element::float32:
      return int64_t(cache.width) * 4;
    case Element::packed8:
      return cache.width;
    case Element::packed4:
      return cache.width / 2;
    default:
      return int64_t(cache.width) * 2;
  }
}

// Blocks lie anywhere, where no processor looks ahead by itself. Into the second cache: that has more on its way.
void fetch(const Cache& cache, int kv_head, const int64_t* slots, int low, int high) {
  int64_t bytes = bytes_of(cache), head = kv_head * cache.slots;
  for (int t = low; t < high; t++) {
    const char* from = static_cast<const char*>(cache.data) + (head + slots[t]) * bytes;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    if (cache.scales == nullptr) continue;
    int64_t place = (head + slots[t]) * cache.groups;
    __builtin_prefetch(cache.scales + place);
    __builtin_prefetch(cache.biases + place);
  }
}

// Vectors of a tile's positions low … high: pointers to them, in place or in `copies` [kTile][stride].
void find(const Cache& cache, int kv_head, const int64_t* slots, int low, int high, float* copies, int stride,
          const float** vectors) {
  int64_t head = kv_head * cache.slots;
  if (in_place(cache)) {
    const float* data = static_cast<const float*>(cache.data);
    for (int t = low; t < high; t++) vectors[t] = data + (head + slots[t]) * cache.width;
    return;
  }
  for (int t = low; t < high; t++) {
    unpack(cache, head + slots[t], copies + t * stride);
    vectors[t] = copies + t * stride;
  }
}

// -- one tile ------------------------------------------------------------------------------------------------

// keys [dim][kTile] of the positions low … high, zero at the other positions of their vectors; kLanes positions at a
// time, so that little is copied before it is used. `copies` [kLanes][stride].
void transpose_keys(const Cache& cache, int kv_head, const int64_t* slots, int low, int high, float* copies,
                    int stride, float* keys) {
  for (int t = low / kLanes * kLanes; t < high; t += kLanes) {
    const float* vectors[kLanes];
    int first = std::max(low - t, 0), last = std::min(high - t, kLanes), d = 0;
    find(cache, kv_head, slots + t, first, last, copies, stride, vectors);
    for (; d + kLanes <= cache.dim; d += kLanes) {
      Vector square[kLanes];
      for (int i = 0; i < kLanes; i++) square[i] = i >= first && i < last ? load(vectors[i] + d) : Vector{};
      transpose(square);
      for (int i = 0; i < kLanes; i++) save(keys + (d + i) * kTile + t, square[i]);
    }
    for (; d < cache.dim; d++)
      for (int i = 0; i < kLanes; i++) keys[d * kTile + t + i] = i >= first && i < last ? vectors[i][d] : 0;
  }
}

template <int Rows, int Vectors>
void score_block(const float* queries, int dim, const float* keys, float* scores) {
  Vector total[Rows][Vectors] = {};
  for (int d = 0; d < dim; d++) {
    Vector key[Vectors];
    for (int v = 0; v < Vectors; v++) key[v] = load(keys + d * kTile + v * kLanes);
    for (int r = 0; r < Rows; r++)
      for (int v = 0; v < Vectors; v++) total[r][v] += key[v] * queries[r * dim + d];
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) save(scores + r * kTile + v * kLanes, total[r][v]);
}

template <int Rows, int Vectors>
void value_block(const float* weights, const float* const* values, int low, int high, int column, float* out,
                 int stride, const float* factors) {
  Vector total[Rows][Vectors];
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) total[r][v] = load(out + r * stride + v * kLanes) * factors[r];
  for (int t = low; t < high; t++) {
    Vector value[Vectors];
    for (int v = 0; v < Vectors; v++) value[v] = load(values[t] + column + v * kLanes);
    for (int r = 0; r < Rows; r++)
      for (int v = 0; v < Vectors; v++) total[r][v] += value[v] * weights[r * kTile + t];
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) save(out + r * stride + v * kLanes, total[r][v]);
}

using ScoreBlock = void (*)(const float*, int, const float*, float*);
using ValueBlock = void (*)(const float*, const float* const*, int, int, int, float*, int, const float*);

template <int... I>
constexpr auto score_blocks(std::integer_sequence<int, I...>) {
  return std::array<ScoreBlock, kRows * kVectors>{score_block<I / kVectors + 1, I % kVectors + 1>...};
}
template <int... I>
constexpr auto value_blocks(std::integer_sequence<int, I...>) {
  return std::array<ValueBlock, kRows * kVectors>{value_block<I / kVectors + 1, I % kVectors + 1>...};
}
constexpr auto kScoreBlocks = score_blocks(std::make_integer_sequence<int, kRows * kVectors>{});
constexpr auto kValueBlocks = value_blocks(std::make_integer_sequence<int, kRows * kVectors>{});

// Sums over some positions for the queries of a piece: the greatest score, lanes of the sum of weights relative to
// it, and the weighted sum of values [rows][stride].
struct Sums {
  float* top;    // [rows]
  float* total;  // [rows][kLanes]
  float* out;    // [rows][stride]

  static size_t size(int rows, int stride) { return size_t(rows) * (1 + kLanes + stride); }

  static Sums at(float* memory, int rows, int stride) {
    return {memory + size_t(rows) * (kLanes + stride), memory + size_t(rows) * stride, memory};
  }

  void clear(int rows, int stride) const {
    std::fill_n(top, rows, kHidden);
    std::fill_n(total, size_t(rows) * kLanes, 0.0f);
    std::fill_n(out, size_t(rows) * stride, 0.0f);
  }
};

// Scores [kTile] of one query become weights, zero where it may not look; `low` … `high` is where it may, whole
// vectors from `first` to `last` what is there. The factor for what the span has so far.
float weigh(float* scores, int first, int last, int low, int high, float softcap, float& top, float* total) {
  const Integers numbers = lane_numbers();
  Vector greatest_scores = all(kHidden);
  for (int t = first; t < last; t += kLanes) {
    Vector s = load(scores + t);
    if (softcap > 0) s = softcap * (1.0f - 2.0f / (exp(s * (2.0f / softcap)) + 1.0f));
    Integers position = numbers + t;
    s = (position >= low) & (position < high) ? s : all(kHidden);
    greatest_scores = larger(s, greatest_scores);
    save(scores + t, s);
  }
  float before = top, now = std::max(before, greatest(greatest_scores));
  Vector factor = exp(all(before - now)), lane_sums = load(total) * factor;
  for (int t = first; t < last; t += kLanes) {
    Integers position = numbers + t;
    Vector weight = exp(load(scores + t) - now);
    weight = (position >= low) & (position < high) ? weight : Vector{};
    lane_sums += weight;
    save(scores + t, weight);
  }
  save(total, lane_sums);
  top = now;
  return factor[0];
}

// -- a piece -------------------------------------------------------------------------------------------------

// Queries first … last (counted in the row) of one row and one KV head; row r of the piece is query
// first + r / shared of head kv_head · shared + r % shared.
struct Queries {
  int row, kv_head, first, last;
};

class Worker {
 public:
  explicit Worker(const Attention& call, int rows)
      : call_(call),
        shared_(call.heads / call.kv_heads),
        dim_(call.keys.dim),
        stride_(whole(call.values.dim)),
        key_stride_(whole(call.keys.width)),
        value_stride_(whole(call.values.width)) {
    size_t sizes[] = {size_t(rows) * dim_,         size_t(rows) * kTile,          size_t(dim_) * kTile,
                      size_t(kLanes) * key_stride_, size_t(kTile) * value_stride_, size_t(rows),
                      Sums::size(rows, stride_),   Sums::size(rows, stride_)};
    float** places[] = {&queries_, &scores_, &keys_, &key_copies_, &value_copies_, &factors_, &sums_, &merged_};
    size_t total = 0;
    for (size_t& size : sizes) total += size = (size + 15) / 16 * 16;
    float* memory = scratch(total);
    for (int i = 0; i < 8; memory += sizes[i++]) *places[i] = memory;
  }

  // The positions that some query of a piece may see: low … high.
  static std::pair<int, int> seen(const Attention& call, const Queries& piece) {
    int offset = call.offsets[piece.row];
    int low = call.window > 0 ? std::max(0, offset + piece.first - call.window + 1) : 0;
    return {std::max(low, call.bases[piece.row]), offset + piece.last};
  }

  // All of a piece.
  void compute(const Queries& piece) {
    auto [low, high] = seen(call_, piece);
    int rows = (piece.last - piece.first) * shared_;
    Sums merged = Sums::at(merged_, rows, stride_), one = Sums::at(sums_, rows, stride_);
    take_queries(piece);
    bool first = true;
    for (int span = low / kSpan; span * kSpan < high; span++, first = false) {
      compute_span(piece, span, first ? merged : one);
      if (!first) merge(merged, one, rows);
    }
    write(piece, merged);
  }

  // One span of a piece.
  void compute(const Queries& piece, int span, const Sums& sums) {
    take_queries(piece);
    compute_span(piece, span, sums);
  }

  void merge(const Sums& into, const Sums& from, int rows) const {
    for (int r = 0; r < rows; r++) {
      if (from.top[r] == kHidden) continue;
      float top = std::max(into.top[r], from.top[r]);
      Vector a = exp(all(into.top[r] - top)), b = exp(all(from.top[r] - top));
      into.top[r] = top;
      float *total = into.total + r * kLanes, *out = into.out + r * stride_;
      save(total, load(total) * a + load(from.total + r * kLanes) * b);
      for (int i = 0; i < stride_; i += kLanes) save(out + i, load(out + i) * a + load(from.out + r * stride_ + i) * b);
    }
  }

  void write(const Queries& piece, const Sums& sums) const {
    int rows = (piece.last - piece.first) * shared_, width = call_.values.dim;
    for (int r = 0; r < rows; r++) {
      int head = piece.kv_head * shared_ + r % shared_;
      float factor = 1, total = sum(load(sums.total + r * kLanes));
      if (call_.sinks != nullptr) {
        float sink = call_.sinks[head], top = std::max(sums.top[r], sink);
        factor = exp_of(sums.top[r] - top);
        total = total * factor + exp_of(sink - top);
      }
      factor /= total;
      int64_t place = (int64_t(piece.row) * call_.length + piece.first + r / shared_) * call_.heads + head;
      const float* from = sums.out + r * stride_;
      float* to = call_.out + place * width;
      for (int i = 0; i < width; i++) to[i] = from[i] * factor;
    }
  }

  int stride() const { return stride_; }

 private:
  void take_queries(const Queries& piece) {
    const int64_t* strides = call_.query_strides;
    int rows = (piece.last - piece.first) * shared_;
    for (int r = 0; r < rows; r++) {
      int head = piece.kv_head * shared_ + r % shared_, query = piece.first + r / shared_;
      const float* from = call_.queries + piece.row * strides[0] + head * strides[1] + query * strides[2];
      for (int d = 0; d < dim_; d++) queries_[r * dim_ + d] = from[d * strides[3]] * call_.scale;
    }
  }

  void compute_span(const Queries& piece, int span, const Sums& sums) {
    auto [low, high] = seen(call_, piece);
    sums.clear((piece.last - piece.first) * shared_, stride_);
    low = std::max(low, span * kSpan), high = std::min(high, (span + 1) * kSpan);
    Tile tiles[3];  // this one, and those on their way
    for (int i = 0; i < 2; i++) prepare(piece, i == 0 ? low : tiles[0].first + kTile, high, tiles[i]);
    for (int i = 0; tiles[i].low < tiles[i].high; i = (i + 1) % 3) {
      prepare(piece, tiles[(i + 1) % 3].first + kTile, high, tiles[(i + 2) % 3]);
      compute_tile(piece, tiles[i], sums);
    }
  }

  // Positions first + low … first + high, and where they are.
  struct Tile {
    int first, low, high;
    int64_t slots[kTile];
  };

  // The tile that position `low` is in, from there to `high` at most, to be computed soon.
  void prepare(const Queries& piece, int low, int high, Tile& tile) const {
    tile.first = low / kTile * kTile;
    tile.low = low - tile.first, tile.high = std::min(high - tile.first, kTile);
    if (tile.low >= tile.high) return;
    const int32_t* table = call_.tables + int64_t(piece.row) * call_.table_width;
    int size = call_.block_size, place = low - call_.bases[piece.row], block = place / size, offset = place % size;
    for (int t = tile.low; t < tile.high; t++) {
      tile.slots[t] = int64_t(table[block]) * size + offset;
      if (++offset == size) offset = 0, block++;
    }
    fetch(call_.keys, piece.kv_head, tile.slots, tile.low, tile.high);
    fetch(call_.values, piece.kv_head, tile.slots, tile.low, tile.high);
  }

  void compute_tile(const Queries& piece, const Tile& tile, const Sums& sums) {
    const float* vectors[kTile];
    int low = tile.low, high = tile.high;
    transpose_keys(call_.keys, piece.kv_head, tile.slots, low, high, key_copies_, key_stride_, keys_);
    int rows = (piece.last - piece.first) * shared_;
    int first = low / kLanes * kLanes, last = whole(high);
    for (int t = first; t < last; t += kVectors * kLanes) {
      int count = std::min(kVectors, (last - t) / kLanes);
      for (int r = 0; r < rows; r += kRows)
        kScoreBlocks[(std::min(kRows, rows - r) - 1) * kVectors + count - 1](queries_ + r * dim_, dim_, keys_ + t,
                                                                             scores_ + r * kTile + t);
    }
    int offset = call_.offsets[piece.row] + piece.first - tile.first;  // of the first query, counted from the tile
    for (int r = 0; r < rows; r++) {
      int query = offset + r / shared_;
      int from = call_.window > 0 ? std::max(low, query - call_.window + 1) : low;
      factors_[r] = weigh(scores_ + r * kTile, first, last, from, std::min(high, query + 1), call_.softcap,
                          sums.top[r], sums.total + r * kLanes);
    }
    find(call_.values, piece.kv_head, tile.slots, low, high, value_copies_, value_stride_, vectors);
    for (int column = 0; column < stride_; column += kVectors * kLanes) {
      int count = std::min(kVectors, (stride_ - column) / kLanes);
      for (int r = 0; r < rows; r += kRows)
        kValueBlocks[(std::min(kRows, rows - r) - 1) * kVectors + count - 1](
            scores_ + r * kTile, vectors, low, high, column, sums.out + r * stride_ + column, stride_, factors_ + r);
    }
  }

  const Attention& call_;
  int shared_, dim_, stride_, key_stride_, value_stride_;
  float *queries_, *scores_, *keys_, *key_copies_, *value_copies_, *factors_, *sums_, *merged_;
};

// -- sharing out ---------------------------------------------------------------------------------------------

struct Part {
  Queries queries;
  int span;     // -1: all of them
  float* sums;  // of the span
};

int rows_of(const Queries& piece, int shared) { return (piece.last - piece.first) * shared; }

std::vector<Queries> pieces_of(const Attention& call) {
  std::vector<Queries> pieces;
  int shared = call.heads / call.kv_heads, most = std::max(1, kPieceRows / shared);
  for (int row = 0; row < call.batch; row++) {
    int count = std::clamp(call.ends[row] - call.offsets[row], 0, call.length);
    for (int last = count; last > 0; last -= most)  // those that see most come first
      for (int head = 0; head < call.kv_heads; head++)
        pieces.push_back({row, head, std::max(0, last - most), last});
    int64_t width = int64_t(call.heads) * call.values.dim;  // what pads give
    std::fill_n(call.out + (int64_t(row) * call.length + count) * width, (call.length - count) * width, 0.0f);
  }
  return pieces;
}

}  // namespace

void attend(const Attention& call) {
  std::vector<Queries> pieces = pieces_of(call);
  int shared = call.heads / call.kv_heads, stride = whole(call.values.dim), most = 1;
  std::vector<Part> parts;
  size_t waiting = 0;
  for (const Queries& piece : pieces) {
    auto [low, high] = Worker::seen(call, piece);
    int rows = rows_of(piece, shared), first = low / kSpan, last = (high - 1) / kSpan;
    size_t floats = Sums::size(rows, stride) * (last - first + 1);
    most = std::max(most, rows);
    if (call.length > 1 || first == last || waiting + floats > kPartialFloats) {
      parts.push_back({piece, -1, nullptr});
      continue;
    }
    for (int span = first; span <= last; span++) parts.push_back({piece, span, nullptr});
    waiting += floats;
  }
  Floats memory = floats(waiting + 1);
  float* next = memory.get();
  for (Part& part : parts)
    if (part.span >= 0) {
      part.sums = next;
      next += Sums::size(rows_of(part.queries, shared), stride);
    }
  parallel(int(parts.size()), 1, [&](int first, int last) {
    Worker worker(call, most);
    for (int i = first; i < last; i++) {
      const Part& part = parts[i];
      if (part.span < 0)
        worker.compute(part.queries);
      else
        worker.compute(part.queries, part.span, Sums::at(part.sums, rows_of(part.queries, shared), stride));
    }
  });
  if (waiting == 0) return;
  Worker worker(call, most);
  for (size_t i = 0; i < parts.size();) {
    const Part& part = parts[i++];
    if (part.span < 0) continue;
    int rows = rows_of(part.queries, shared);
    Sums merged = Sums::at(part.sums, rows, stride);
    for (; i < parts.size() && parts[i].span > part.span; i++) {
      const Queries &one = parts[i].queries, &other = part.queries;
      if (one.row != other.row || one.kv_head != other.kv_head) break;
      worker.merge(merged, Sums::at(parts[i].sums, rows, stride), rows);
    }
    worker.write(part.queries, merged);
  }
}

}  // namespace headrace
