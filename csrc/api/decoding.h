// What the operators of flex decoding share.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "../decoding/call.h"
#include "tensors.h"

namespace flashbwd {

// What the calls of a loop have in common: registered once and then named by a number, which an operator's call reads
// sooner than eight arguments.
struct DecodingSettings {
  int64_t modification;
  int64_t mask_tensors;  // how many of a call's other tensors are the mask's; the rest are captured
  int64_t q_block, kv_block;
  bool enable_gqa;
  int64_t splits;  // 0: as many as serve best
  bool need_lse, need_max_scores;
  bool need_exact_out;
};

DecodingSettings decoding_settings(int64_t number);

// Of a modification that Python has registered; of kind kNone for one that needs kernels compiled for it.
OrdinaryMod ordinary_modification(int64_t modification);

// A call of these tensors, but for the mask's and those captured.
DecodingCall decoding_call(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
                           const DecodingSettings& settings);

// Launches it. out, the statistics that are needed, and the exact out where out is not; nothing for a call that no
// kernel takes as it is.
std::vector<OwnedTensor> decoding_results(AtenTensorHandle q, const DecodingCall& call,
                                          const DecodingSettings& settings, std::optional<double> scale);

}  // namespace flashbwd
