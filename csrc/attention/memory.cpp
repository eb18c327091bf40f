#include "memory.h"

#include <utility>

#include "../common/check.h"
#include "../common/overlap.h"

namespace flashbwd {

void check_memory(const AttentionArguments& a) {
  using Named = std::pair<const char*, const TensorDesc*>;
  const Named inputs[] = {
      {"q", &a.q},
      {"k", &a.k},
      {"v", &a.v},
      {"out", &a.out},
      {"dout", &a.dout},
      {"softmax_lse", &a.softmax_lse},
      {"attn_bias", &a.attn_bias},
      {"key_mask", &a.key_mask},
      {"alibi_slopes", &a.alibi_slopes},
      {"sink", &a.sink},
      {"dlse", &a.dlse},
      {"rng_state.seed", &a.rng_seed},
      {"rng_state.offset", &a.rng_offset},
      {"cu_seqlens_q", &a.cu_seqlens_q},
      {"cu_seqlens_k", &a.cu_seqlens_k},
      {"seqused_q", &a.seqused_q},
      {"seqused_k", &a.seqused_k},
      {"block_lists", &a.block_lists},
      {"block_entries", &a.block_entries},
      {"block_bits", &a.block_bits},
  };
  const Named outputs[] = {{"dq", &a.dq}, {"dk", &a.dk}, {"dv", &a.dv}, {"workspace", &a.workspace}};
  for (const auto& [name, output] : outputs) {
    if (!output->defined) continue;
    check(!elements_overlap(*output), name, " has elements that overlap, expected memory of its own for every element");
    for (const auto& [other, input] : inputs) {
      check(!share_memory(*output, *input), name, " shares its memory with ", other,
            ", expected memory of its own: inputs are never written to");
    }
    for (const auto& [other, second] : outputs) {
      check(second == output || !share_memory(*output, *second), name, " shares its memory with ", other,
            ", expected memory of its own");
    }
  }
}

}  // namespace flashbwd
