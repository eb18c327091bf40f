// Index arithmetic that host and device share: which key blocks a query block sees, who works on what, and how many
// workers touch a dq tile. Everything here is constexpr-friendly integer code; tests brute-force it.
#pragma once

#include <cstdint>

#include "../common/macros.h"
#include "params.h"

namespace flashbwd {

FLASHBWD_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FLASHBWD_HOST_DEVICE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace flashbwd
