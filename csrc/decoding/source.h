#pragma once

#include <string>

namespace flashbwd {

// The files that the forward kernel is made of, one after the other, with their #include and #pragma lines.
std::string decoding_source();
std::string decoding_mod_functions();  // what emitted modifications are written in terms of

// Those of the backward kernel.
std::string decoding_backward_source();

}  // namespace flashbwd
