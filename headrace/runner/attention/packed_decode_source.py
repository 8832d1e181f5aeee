"""How paged decode attention by tensor cores (``tile_decode_source.py``) reads packed pools.

    scores   a code c becomes the half-precision number 1024 + c, exactly, by being put among its mantissa bits,
             and is multiplied as it is: with query q, scale s, bias b and a sum over a group,
                 q . (s c + b) = s (q . (1024 + c)) + (b - 1024 s) sum(q)
    values   a weight is the softmax's times the token's scale, in half precision; 1024 times the sum of those
             rounded weights is taken off again, and biases are summed in float32. Scales are taken relative to one
             of them, raised when a token's is SPREAD times larger, so that neither overflows
    lanes    16 codes of keys and 8 of values at a time

Queries are exact in half precision up to its range (65504).
"""

from __future__ import annotations

# Elements that a scale is for; widths are multiples of it.
GROUP = 64

PACKED = """
#define KEY_POOL Codes<S>{k, ks, kb}
#define VALUE_POOL Codes<S>{v, vs, vb}
#define READER Reader<S, BITS, DK, DV, KV>
template <typename S> struct Codes { const unsigned* codes; const S* scales; const S* biases; };
template <typename S, int N> struct alignas(sizeof(S) * N) Groups { S v[N]; };
template <int N> struct Bits {};
// Two numbers in half precision, which are added to sums as rounded.
DEVICE unsigned halves(float x, float y, float& sum_x, float& sum_y) {
  const __half pair[2] = {__half(x), __half(y)};
  sum_x += float(pair[0]);
  sum_y += float(pair[1]);
  return *reinterpret_cast<const unsigned*>(pair);
}
DEVICE float in_range(float x) { return MIN(MAX(x, -65504.0f), 65504.0f); }
// 1024 + two bytes of x: those that the selector names; 1024 + two nibbles of x, the lowest of each half.
#define BYTES(x, which) __byte_perm(x, 0x64646464u, which)
#define NIBBLES(x) (((x) & 0x000f000fu) | 0x64006400u)
// Which of 16 codes step s has in register e, half h, of a fragment of keys; and that register.
DEVICE int code_at(Bits<8>, int s, int e, int h) { return s * 4 + e * 2 + h; }
DEVICE int code_at(Bits<4>, int s, int e, int h) { return s / 2 * 8 + s % 2 * 2 + e + h * 4; }
DEVICE unsigned key_codes(Words<4> x, int s, int e) { return BYTES(x.w[s], e == 0 ? 0x4140u : 0x4342u); }
DEVICE unsigned key_codes(Words<2> x, int s, int e) { return NIBBLES(x.w[s / 2] >> (s % 2 * 8 + e * 4)); }
// Code j of 8 of two tokens.
DEVICE unsigned value_codes(Words<2> x, Words<2> y, int j) {
  const unsigned pairs = __byte_perm(x.w[j / 4], y.w[j / 4], j % 4 < 2 ? 0x5140u : 0x7362u);
  return BYTES(pairs, j % 2 == 0 ? 0x4140u : 0x4342u);
}
DEVICE unsigned value_codes(Words<1> x, Words<1> y, int j) {
  return NIBBLES(__byte_perm(x.w[0], y.w[0], j < 4 ? 0x5410u : 0x7632u) >> (j % 4 * 4));
}
template <typename S, int BITS, int DK, int DV, int KV> struct Reader {
  static constexpr int CK = DK / 64;
  static constexpr int CV = DV / 64;
  static constexpr float OFFSET = 1024.0f;
  static constexpr float SPREAD = 256.0f;
  struct Query {
    const uint4* own;                        // 16 codes' worth of query g
    float sum[CK][2];                       // of queries 2 t and 2 t + 1
    const float* sums;
    template <typename T> __forceinline__ void read(const T* q, int count, Lane lane) {
      SHARED uint4 pieces[CK * 2 * 32];
      SHARED float sums_of_queries[CK * 8];
      own = pieces + lane.g * 4 + lane.t;
      sums = sums_of_queries;
      if (lane.warp >= CK) return;
      const int c = lane.warp;
      float all = 0.0f;
      UNROLL for (int s = 0; s < 4; s += 2) {
        unsigned piece[4];
        UNROLL for (int e = 0; e < 4; ++e) {
          float x[2];
          UNROLL for (int h = 0; h < 2; ++h) {
            const int dim = c * 64 + lane.t * 16 + code_at(Bits<BITS>(), s + e / 2, e % 2, h);
            x[h] = lane.g < count ? in_range(float(q[lane.g * DK + dim])) : 0.0f;
          }
          piece[e] = halves(x[0], x[1], all, all);
        }
        pieces[(c * 2 + s / 2) * 32 + lane.g * 4 + lane.t] = make_uint4(piece[0], piece[1], piece[2], piece[3]);
      }
      all += SHUFFLE_XOR(all, 1);
      all += SHUFFLE_XOR(all, 2);
      if (lane.t == 0) sums_of_queries[c * 8 + lane.g] = all;
    }
    __forceinline__ void ready(Lane lane) {
      UNROLL for (int c = 0; c < CK; ++c)
        UNROLL for (int h = 0; h < 2; ++h) sum[c][h] = sums[c * 8 + 2 * lane.t + h];
    }
  };
  struct Keys {
    Words<BITS / 2> piece[2][CK];
    Groups<S, CK> scale[2], bias[2];
    __forceinline__ void read(const Codes<S>& k, const Rows<KV>& rows, Lane lane) {
      UNROLL for (int n = 0; n < 2; ++n) {
        const size_t own = rows.at(lane.g + n * 8);
        UNROLL for (int c = 0; c < CK; ++c)
          piece[n][c] = *reinterpret_cast<const Words<BITS / 2>*>(
              k.codes + own * (CK * 2 * BITS) + lane.t * (BITS / 2) + c * (2 * BITS));
        scale[n] = *reinterpret_cast<const Groups<S, CK>*>(k.scales + own * CK);
        bias[n] = *reinterpret_cast<const Groups<S, CK>*>(k.biases + own * CK);
      }
    }
    __forceinline__ void scores(const Query& query, float (&score)[2][2]) const {
      UNROLL for (int i = 0; i < 4; ++i) score[i / 2][i % 2] = 0.0f;
      UNROLL for (int c = 0; c < CK; ++c) {
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        UNROLL for (int i = 0; i < 2; ++i) {
          const uint4 asked = anew(query.own + (c * 2 + i) * 32);
          UNROLL for (int s = 2 * i; s < 2 * i + 2; ++s)
            multiply(part, key_codes(piece[0][c], s, 0), key_codes(piece[1][c], s, 0),
                     key_codes(piece[0][c], s, 1), key_codes(piece[1][c], s, 1), word(asked, s % 2 * 2),
                     word(asked, s % 2 * 2 + 1), (const __half*)(nullptr));
        }
        UNROLL for (int n = 0; n < 2; ++n) {
          const float by = float(scale[n].v[c]);
          const float offset = float(bias[n].v[c]) - OFFSET * by;
          UNROLL for (int h = 0; h < 2; ++h) score[n][h] += by * part[2 * n + h] + offset * query.sum[c][h];
        }
      }
    }
  };
  struct Values {
    Words<BITS / 4> piece[4][CV];           // tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9
    Groups<S, CV> scale[2], bias[2];        // of tokens g and g + 8
    __forceinline__ void read(const Codes<S>& v, const Rows<KV>& rows, Lane lane) {
      UNROLL for (int n = 0; n < 2; ++n) {
        const size_t own = rows.at(lane.g + n * 8);
        scale[n] = *reinterpret_cast<const Groups<S, CV>*>(v.scales + own * CV);
        bias[n] = *reinterpret_cast<const Groups<S, CV>*>(v.biases + own * CV);
      }
      UNROLL for (int i = 0; i < 4; ++i) {
        const size_t own = rows.at(2 * lane.t + i % 2 + i / 2 * 8);
        UNROLL for (int c = 0; c < CV; ++c)
          piece[i][c] = *reinterpret_cast<const Words<BITS / 4>*>(
              v.codes + own * (CV * 2 * BITS) + lane.g * (BITS / 4) + c * (2 * BITS));
      }
    }
  };
  struct Sums {
    float total[CV][4][4];                  // elements 8 g + 2 j + r of query h at [j][2 r + h]
    float rounded[CV][2], biased[CV][2];    // sums over this lane's tokens
    float unit, per_unit;                   // scales of values are counted in units
    __forceinline__ void clear() {
      unit = per_unit = 0.0f;
      UNROLL for (int c = 0; c < CV; ++c) {
        UNROLL for (int h = 0; h < 2; ++h) rounded[c][h] = biased[c][h] = 0.0f;
        UNROLL for (int j = 0; j < 4; ++j)
          UNROLL for (int i = 0; i < 4; ++i) total[c][j][i] = 0.0f;
      }
    }
    template <int U, bool FIRST>
    __forceinline__ void add(const Values (&value)[U], const float (&weight)[U][2][2],
                             const float (&correction)[2], Flag<FIRST>) {
      float widest = 0.0f, shrink[2] = {correction[0], correction[1]};
      UNROLL for (int u = 0; u < U; ++u)
        UNROLL for (int n = 0; n < 2; ++n)
          UNROLL for (int c = 0; c < CV; ++c) widest = MAX(widest, ABS(float(value[u].scale[n].v[c])));
      if (__any_sync(0xffffffffu, widest > SPREAD * unit)) {
        const float fresh = MAX(most_of_tokens(widest), unit);
        UNROLL for (int h = 0; h < 2; ++h) shrink[h] *= unit / fresh;
        unit = fresh;
        per_unit = 1.0f / fresh;
      }
      UNROLL for (int c = 0; c < CV; ++c) {
        UNROLL for (int h = 0; h < 2; ++h) {
          rounded[c][h] *= shrink[h];
          biased[c][h] *= correction[h];
        }
        UNROLL for (int j = 0; j < 4; ++j)
          UNROLL for (int i = 0; i < 4; ++i) total[c][j][i] = FIRST ? 0.0f : total[c][j][i] * shrink[i % 2];
        UNROLL for (int u = 0; u < U; ++u) {
          const Words<BITS / 4>* const codes[4] = {&value[u].piece[0][c], &value[u].piece[1][c],
                                                   &value[u].piece[2][c], &value[u].piece[3][c]};
          unsigned shares[2];
          UNROLL for (int n = 0; n < 2; ++n) {
            const float by = float(value[u].scale[n].v[c]) * per_unit;
            UNROLL for (int h = 0; h < 2; ++h) biased[c][h] += weight[u][n][h] * float(value[u].bias[n].v[c]);
            shares[n] =
                transposed(halves(weight[u][n][0] * by, weight[u][n][1] * by, rounded[c][0], rounded[c][1]));
          }
          UNROLL for (int j = 0; j < 4; ++j)
            multiply(total[c][j], value_codes(*codes[0], *codes[1], 2 * j),
                     value_codes(*codes[0], *codes[1], 2 * j + 1), value_codes(*codes[2], *codes[3], 2 * j),
                     value_codes(*codes[2], *codes[3], 2 * j + 1), shares[0], shares[1], (const __half*)(nullptr));
        }
      }
    }
    __forceinline__ void finish() {
      UNROLL for (int c = 0; c < CV; ++c) {
        UNROLL for (int h = 0; h < 2; ++h) {
          rounded[c][h] = sum_of_tokens(rounded[c][h]);
          biased[c][h] = sum_of_tokens(biased[c][h]);
        }
      }
    }
    // Element 8 g + i of piece c, of query h.
    __forceinline__ float at(int c, int i, int h) const {
      return unit * (total[c][i / 2][i % 2 * 2 + h] - OFFSET * rounded[c][h]) + biased[c][h];
    }
  };
};
"""
