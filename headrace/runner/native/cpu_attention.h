// Paged attention of a whole forward on the CPU; cpu_attention.cpp says how.

#pragma once

#include <cstdint>

namespace headrace {

enum class Element { float32, float16, bfloat16, packed8, packed4 };

// Keys or values of one layer in a head-major pool [kv_heads, slots, width].
struct Cache {
  Element element;
  const void* data;
  const uint16_t* scales;  // packed: 16 bits each, [kv_heads, slots, groups]; x = scale · code + bias
  const uint16_t* biases;
  bool bfloat16_scales;
  int64_t slots;
  int dim;         // elements that mean something
  int width;       // elements held: padded to whole groups when packed
  int group_size, groups;  // of packed ones
};

struct Attention {
  int batch, length, heads, kv_heads;
  int block_size, table_width;
  int window;  // positions seen, own included; 0: all
  float scale, softcap;
  Cache keys, values;
  const float* queries;  // [batch, heads, length, keys.dim]
  int64_t query_strides[4];
  const int32_t* tables;   // [batch, table_width] block ids
  const int32_t* bases;    // [batch] position of a table's first slot
  const int32_t* offsets;  // [batch] position of a row's first query
  const int32_t* ends;     // [batch] positions in a row's context
  const float* sinks;      // [heads] or null
  float* out;              // [batch, length, heads, values.dim]
};

void attend(const Attention& call);

}  // namespace headrace
