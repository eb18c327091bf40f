#pragma once

#include <string>

namespace flashbwd {

// params.h, ptx.cuh and split_kv.cuh, one after the other, with their #include and #pragma lines.
std::string decoding_source();
std::string decoding_mod_functions();  // what emitted modifications are written in terms of

}  // namespace flashbwd
