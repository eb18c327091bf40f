#pragma once

namespace flashbwd {

constexpr int kWarpgroupThreads = 128;

}  // namespace flashbwd
