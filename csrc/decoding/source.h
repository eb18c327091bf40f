#pragma once

#include <string>

namespace flashbwd {

// Source text of the forward kernel for NVRTC: its files concatenated. The caller removes #include and #pragma lines.
std::string decoding_source();

// Source text of the functions that generated modifications call.
std::string decoding_mod_functions();

// Source text of the backward kernel; format as in decoding_source().
std::string decoding_backward_source();

}  // namespace flashbwd
