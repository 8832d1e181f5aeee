// Halves of a decoder block as one operation each, for decode steps (cpu_block.cpp).

#pragma once

#include <nanobind/nanobind.h>

namespace headrace {

void bind_blocks(nanobind::module_& module);

}  // namespace headrace
