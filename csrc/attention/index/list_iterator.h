// The query loop of a work tile if a block mask lists its query blocks. The iterator has the interface of QueryIterator
// (query_iterator.h). `Tile` has entries, first_index, iterations and first_head.
#pragma once

#include <cstdint>

#include "../params.h"

namespace flashbwd {

// Base class of a work tile.
template <bool kListed>
struct ListedLoop {};

template <>
struct ListedLoop<true> {
  const QueryBlockEntry* entries;  // the first one that the loop visits
  int32_t entry_step;              // 1, or -1 if it visits the list from its end
};

struct ListIterator {
  int32_t index;               // as in QueryIterator
  int32_t end;                 // as in QueryIterator
  QueryBlockEntry entry = {};  // of the current query block; its head counts within the KV head

  template <typename Tile>
  FLASHBWD_HOST_DEVICE explicit ListIterator(const Tile& tile)
      : index(tile.first_index), end(tile.first_index + tile.iterations), first_head_(tile.first_head) {
    if (index < end) entry = tile.entries[0];
  }

  FLASHBWD_HOST_DEVICE int32_t head() const { return first_head_ + entry.head; }
  FLASHBWD_HOST_DEVICE int32_t query_block() const { return entry.query_block; }

  template <typename Tile>
  FLASHBWD_HOST_DEVICE void advance(const Tile& tile) {
    if (++index < end) entry = tile.entries[(index - tile.first_index) * tile.entry_step];
  }

 private:
  int32_t first_head_;
};

// For a thread with few registers: keeps the current entry only, and reads everything else again.
template <typename Tile>
struct SmallListIterator {
  const Tile& tile;
  int32_t index = tile.first_index;
  QueryBlockEntry entry = {};

  FLASHBWD_HOST_DEVICE explicit SmallListIterator(const Tile& tile) : tile(tile) { read(); }

  FLASHBWD_HOST_DEVICE int32_t head() const { return tile.first_head + entry.head; }
  FLASHBWD_HOST_DEVICE int32_t query_block() const { return entry.query_block; }
  FLASHBWD_HOST_DEVICE void advance_rereading(const Tile&) {
    ++index;
    read();
  }

 private:
  FLASHBWD_HOST_DEVICE void read() {
    if (index < tile.first_index + tile.iterations) entry = tile.entries[(index - tile.first_index) * tile.entry_step];
  }
};

}  // namespace flashbwd
