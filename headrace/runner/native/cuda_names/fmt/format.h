// MLX's headers format one message with fmt, which its wheel does not carry.
#pragma once
#include <string>

namespace fmt {
template <typename... Args>
std::string format(const char* text, Args&&...) {
  return text;
}
}  // namespace fmt
