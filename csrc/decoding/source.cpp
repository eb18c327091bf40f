// Embeds the source text of the kernels. NVRTC compiles it together with the code of a user's modification.
#include "source.h"

// These headers are (almost) empty for a host compiler. The includes make the build depend on the files embedded below,
// so that a change of one of them rebuilds this file.
#include "backward.cuh"
#include "backward_params.h"
#include "backward_rows.cuh"
#include "block_lists.cuh"
#include "elements.cuh"
#include "last_block.cuh"
#include "merge.cuh"
#include "mod.cuh"
#include "mod_functions.cuh"
#include "online_softmax.cuh"
#include "params.h"
#include "ptx.cuh"
#include "ring.cuh"
#include "split_kv.cuh"

#define FLASHBWD_EMBED(name, path)                                                 \
  asm(".section .rodata\n" #name ":\n.incbin \"" path "\"\n.byte 0\n.previous\n"); \
  extern "C" __attribute__((visibility("hidden"))) const char name[];

FLASHBWD_EMBED(flashbwd_decoding_mod, "csrc/decoding/mod.cuh")
FLASHBWD_EMBED(flashbwd_decoding_mod_functions, "csrc/decoding/mod_functions.cuh")
FLASHBWD_EMBED(flashbwd_decoding_params, "csrc/decoding/params.h")
FLASHBWD_EMBED(flashbwd_decoding_ptx, "csrc/decoding/ptx.cuh")
FLASHBWD_EMBED(flashbwd_decoding_block_lists, "csrc/decoding/block_lists.cuh")
FLASHBWD_EMBED(flashbwd_decoding_elements, "csrc/decoding/elements.cuh")
FLASHBWD_EMBED(flashbwd_decoding_merge, "csrc/decoding/merge.cuh")
FLASHBWD_EMBED(flashbwd_decoding_online_softmax, "csrc/decoding/online_softmax.cuh")
FLASHBWD_EMBED(flashbwd_decoding_last_block, "csrc/decoding/last_block.cuh")
FLASHBWD_EMBED(flashbwd_decoding_backward_params, "csrc/decoding/backward_params.h")
FLASHBWD_EMBED(flashbwd_decoding_backward_rows, "csrc/decoding/backward_rows.cuh")
FLASHBWD_EMBED(flashbwd_decoding_backward, "csrc/decoding/backward.cuh")
FLASHBWD_EMBED(flashbwd_decoding_ring, "csrc/decoding/ring.cuh")
FLASHBWD_EMBED(flashbwd_decoding_split_kv, "csrc/decoding/split_kv.cuh")

namespace flashbwd {

std::string decoding_source() {
  return std::string(flashbwd_decoding_params) + flashbwd_decoding_mod + flashbwd_decoding_ptx +
         flashbwd_decoding_block_lists + flashbwd_decoding_elements + flashbwd_decoding_merge +
         flashbwd_decoding_last_block + flashbwd_decoding_online_softmax + flashbwd_decoding_ring +
         flashbwd_decoding_split_kv;
}

std::string decoding_backward_source() {
  return std::string(flashbwd_decoding_params) + flashbwd_decoding_mod + flashbwd_decoding_ptx +
         flashbwd_decoding_elements + flashbwd_decoding_merge + flashbwd_decoding_backward_params +
         flashbwd_decoding_backward_rows + flashbwd_decoding_backward;
}

std::string decoding_mod_functions() { return flashbwd_decoding_mod_functions; }

}  // namespace flashbwd
