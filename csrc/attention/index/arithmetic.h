// Integer arithmetic that host and device share.
#pragma once

#include <cstdint>

#include "../../common/macros.h"

namespace flashbwd {

FLASHBWD_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FLASHBWD_HOST_DEVICE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
FLASHBWD_HOST_DEVICE constexpr int64_t at_least(int64_t a, int64_t floor) { return a < floor ? floor : a; }
FLASHBWD_HOST_DEVICE constexpr int64_t at_most(int64_t a, int64_t ceiling) { return a > ceiling ? ceiling : a; }

}  // namespace flashbwd
