// One way to refuse bad input: "flashbwd: " and a sentence that names the argument, what was expected and what came.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace flashbwd {

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  message << "flashbwd: ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

template <typename... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) refuse(parts...);
}

}  // namespace flashbwd
