// What one library of the CPU's operations lends another: they are loaded apart, as vectors mean different things in
// them, so functions pass as addresses.

#pragma once

#include "cpu_attention.h"
#include "cpu_elementwise.h"

namespace headrace {

struct Functions {
  decltype(rms_norm)* normed;
  decltype(rotate)* rotated;
  decltype(attend)* attended;
};

}  // namespace headrace
