// Errors for bad input: "flashbwd: " and a sentence that names the argument, its value and what was expected.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace flashbwd {

// The last message of refuse() on this thread. From torch 2.15 on, every C++ exception reaches Python as a
// RuntimeError; Python compares the message with this one to recognize an invalid argument.
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
