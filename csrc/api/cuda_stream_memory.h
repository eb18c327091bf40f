// Memory that the calls on one stream share, one after the other.
#pragma once

#include "../decoding/launch.h"

namespace flashbwd {

// Null pointers while the stream is being captured, since a graph may run beside other work, or without memory.
StreamMemory stream_memory(int device, void* stream);

}  // namespace flashbwd
