// Device memory that all calls on one stream share; stream order serializes its use.
#pragma once

#include "../decoding/launch.h"

namespace flashbwd {

// Returns null pointers while the stream is being captured (a graph may later run concurrently with the stream), for
// the per-thread default stream, or if the allocation fails.
StreamMemory stream_memory(int device, void* stream);

}  // namespace flashbwd
