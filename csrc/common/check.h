// One way to refuse bad input: "flashbwd: " and a sentence that names the argument, what was expected and what came.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace flashbwd {

// The last message of refuse() on this thread. From torch 2.15 on a C++ exception reaches Python as a RuntimeError of
// whatever kind it was; this tells Python which of them were refusals.
inline thread_local std::string last_refusal;

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  message << "flashbwd: ";
  (message << ... << parts);
  last_refusal = message.str();
  throw std::invalid_argument(last_refusal);
}

template <typename... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) refuse(parts...);
}

}  // namespace flashbwd
