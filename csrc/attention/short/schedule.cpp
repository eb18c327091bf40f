#include "schedule.h"

#include <algorithm>

#include "../../common/types.h"
#include "../index/arithmetic.h"

namespace flashbwd::short_sequences {
namespace {

int64_t heads_per_kv(const AttentionProblem& p) { return p.heads / std::max<int64_t>(p.heads_kv, 1); }

bool has_features(const AttentionProblem& p) { return p.has_bias || p.has_key_mask || p.has_alibi; }

// True if every pair of a CTA has the same plane of the bias, given that its pairs have the same head.
bool keeps_bias(const AttentionProblem& p) {
  return p.has_bias && p.bias_broadcast_batch && (heads_per_kv(p) == 1 || p.bias_broadcast_head);
}

// CTAs that run at the same time.
int64_t resident_ctas(const Tile& tile, const KernelPlan& kernel, const DeviceInfo& device) {
  constexpr int64_t kReserved = 1024;  // shared memory that each CTA takes in addition
  const int64_t shared = device.smem_per_block + kReserved;
  const int64_t per_sm = at_most(shared / (kernel.shared.bytes + kReserved), tile.ctas_per_sm(kernel.features));
  return at_least(device.sm_count, 1) * at_least(per_sm, 1);
}

// CTAs per KV head: as many as run at the same time, each with equally many sequences as far as possible.
int64_t choose_slots(const AttentionProblem& p, int64_t resident) {
  constexpr int64_t kMost = 65535;  // size of the grid
  const int64_t slots = at_most(at_least(resident / p.heads_kv, 1), kMost);
  return ceil_div(p.batch, ceil_div(p.batch, slots));
}

}  // namespace

bool sums_bias_gradient(const AttentionProblem& p) {
  return p.need_dbias && (p.bias_broadcast_batch || p.bias_broadcast_head);
}

SharedRegions shared_regions(const AttentionProblem& p, const Tile& tile, const DeviceInfo& device) {
  SharedRegions regions;
  regions.bytes = tile.shared_bytes();
  const auto take = [&regions](int32_t bytes) {
    const int32_t offset = regions.bytes;
    regions.bytes += bytes;
    return offset;
  };
  if (heads_per_kv(p) > 1) regions.key_sums = take(tile.key_sums_bytes());
  if (sums_bias_gradient(p)) regions.bias_sums = take(tile.scores_bytes(sizeof(float)));
  const int32_t bias_bytes = tile.scores_bytes(static_cast<int32_t>(size_of(p.bias_dtype)));
  // Without this region the kernel reads the bias from global memory for each pair.
  if (keeps_bias(p) && regions.bytes + bias_bytes <= device.smem_per_block) regions.bias = take(bias_bytes);
  return regions;
}

KernelPlan plan_kernel(const AttentionProblem& p, const Tile& tile, const DeviceInfo& device) {
  KernelPlan kernel;
  kernel.features = has_features(p);
  kernel.shared = shared_regions(p, tile, device);
  kernel.slots = static_cast<int32_t>(choose_slots(p, resident_ctas(tile, kernel, device)));
  if (p.need_dbias) kernel.bias_gradient.mode = BiasGradientMode::kStore;
  if (sums_bias_gradient(p)) {
    kernel.bias_planes = static_cast<int32_t>(p.bias_broadcast_head ? 1 : p.heads);
    const int64_t ctas = p.heads_kv * kernel.slots;
    kernel.bias_slots = static_cast<int32_t>(ctas / kernel.bias_planes);
    kernel.bias_gradient.elements = ctas * p.seqlen_q * p.seqlen_k;
  }
  return kernel;
}

}  // namespace flashbwd::short_sequences
