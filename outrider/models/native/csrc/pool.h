// The KV cache of a decoder, and attention over it, for all types of its elements.
#pragma once

#include <cstdint>
#include <memory>

#include "attention.h"

extern "C" {

// Keys and values of all layers, in blocks that sequences may share.
struct Pool {
  void* entries;         // [blocks][layers][key heads][keys, values] parts, as in attention.h
  const int32_t* table;  // [slots][reach] block tables
  const float* key_offset;  // [layers][key heads][dim] what keys of bytes are stored without
  int32_t layers, reach;
  int32_t bits;          // of an element: 8 (bytes with scales), 16 (bfloat16) or 32 (float)
};
}

namespace outrider {

// Attention over a pool. Heads are counted from 0 among the queries, the keys or the values.
class Attention {
 public:
  virtual ~Attention() = default;

  // Grow the buffers for a pass of this many columns, and for the sums of this many sections of tiles of `width` columns.
  virtual void reserve(int columns, int sections, int width) = 0;
  virtual void set_query(int column, int head, const float* x) = 0;
  virtual void set_key(int slot, int layer, int entry, int head, const float* x) = 0;
  virtual void set_value(int slot, int layer, int entry, int head, const float* x) = 0;

  // Write the attention outputs of a tile for the query heads that share key head `head`. `out` is
  // [columns][query heads * dim].
  virtual void attend(const Columns& columns, const Tile& tile, int slot, int layer, int head, const Heads& heads,
                      float* out, int thread) = 0;

  // Do the same in two steps. The first one attends to one section of entries, and keeps sums of number `number`. The second
  // one adds the sums of `count` sections, from that number on.
  virtual void attend_section(const Columns& columns, const Tile& tile, int slot, int layer, int head, const Heads& heads,
                           int section, int number, int thread) = 0;
  virtual void add_sections(const Tile& tile, int head, const Heads& heads, int number, int count, float* out,
                         int thread) = 0;
};

std::unique_ptr<Attention> make_attention(const Pool& pool, const Heads& heads, int threads);

}  // namespace outrider
