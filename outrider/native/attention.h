// Attention of a pass over the cache, one tile of columns and one key head at a time.
//
// A slot's entries lie in blocks, which a table names in the order of the text. A column sees the first `seen` entries of
// its slot and then the entries that its tail names. Entries are taken in that order, sixteen at a time, so that the sums
// of a guess in a tree are those of the same token in a chain, and those of the same token alone, wherever its blocks
// lie: not nearly, bit for bit.
#pragma once

#include <cmath>
#include <vector>

#include "simd.h"

namespace outrider {

constexpr int kQueries = 48;  // rows of a tile: columns times the query heads that share a key head
constexpr int kBlock = 64;    // entries of a block, as cache/paged.py has it
static_assert(kBlock % kLanes == 0, "sixteen entries that follow each other lie in one block");

// What each column of a pass sees.
struct Columns {
  const int32_t* position;
  const int32_t* seen;
  const int32_t* tail_begin;  // [columns + 1] into `tail`
  const int32_t* tail;        // entries of the slot, in order of depth
};

struct Heads {
  int query, key, dim;
  float scale;
  int window;  // entries that a column sees at most, itself included; 0 for all
};

// Columns first .. last - 1, all of one slot.
struct Tile {
  int first, last;
};

// What one slot has of one layer and key head. Elements are bfloat16, or float where the model is.
template <class Element>
struct Entries {
  Element *keys, *values;  // [dim] each, of block 0's first entry
  const int32_t* table;    // the slot's blocks
  int64_t stride;          // from one block to the next, in entries

  int64_t at(uint32_t entry) const { return table[entry / kBlock] * stride + entry % kBlock; }
};

// Keys and queries meet word by word.
template <class Element>
constexpr int kInWord = 4 / sizeof(Element);

// A query row that waits to meet the gathered entries low .. count - 1.
template <class Element>
struct Guest {
  const Element* query;  // [dim]
  int row, low, count;
};

template <class Element>
struct Scratch {
  std::vector<float> sums, values;
  std::vector<int32_t> keys;
  std::vector<Guest<Element>> guests, own;  // who meets the entries as they lie, and who brings entries of its own
  float most[kQueries], mass[kQueries * kLanes];
  explicit Scratch(int dim) : sums(kQueries * dim), values(kLanes * dim), keys(kLanes * dim / kInWord<Element>) {}
};

// Ask for an entry that will be read soon: what is strewn over pages no processor foresees by itself.
template <class Element>
inline void foresee(const Element* entry, int dim) {
  for (int d = 0; d < dim; d += 64 / int(sizeof(Element))) __builtin_prefetch(entry + d);
}

// The entries at[0 .. count - 1], and zeros up to sixteen: keys as words, one entry a lane; values widened. From each of
// them it is `ahead` entries to the one that most likely comes sixteen later.
template <class Element>
inline void gather(const Entries<Element>& from, const int64_t* at, int count, int64_t ahead, int dim,
                   Scratch<Element>& s) {
  constexpr int each = kInWord<Element>;
  for (int j = 0; j < count; j++) {
    foresee(from.keys + (at[j] + ahead) * dim, dim);
    foresee(from.values + (at[j] + ahead) * dim, dim);
  }
  for (int d = 0; d < dim / each; d += kLanes) {
    Ints row[kLanes] = {};
    const int words = std::min(kLanes, dim / each - d);
    for (int j = 0; j < count; j++) std::memcpy(&row[j], from.keys + at[j] * dim + each * d, 4 * words);
    transpose(row);
    for (int j = 0; j < words; j++) store(&s.keys[(d + j) * kLanes], row[j]);
  }
  for (int j = 0; j < kLanes; j++)
    for (int d = 0; d < dim; d += kLanes)
      store(&s.values[j * dim + d], j < count ? widen16(from.values + at[j] * dim + d) : Floats{});
}

// sums += weights * values, for Width vectors of each of R rows.
template <int R, int Width, class Element>
inline void mix(const Guest<Element>* guest, const float (&weight)[R][kLanes], const float (&keep)[R], int d, int dim,
                Scratch<Element>& s) {
  Floats total[R][Width];
  for (int i = 0; i < R; i++)
    for (int v = 0; v < Width; v++) total[i][v] = load(&s.sums[guest[i].row * dim + d + v * kLanes]) * keep[i];
  for (int j = 0; j < kLanes; j++)
    for (int v = 0; v < Width; v++) {
      const Floats value = load(&s.values[j * dim + d + v * kLanes]);
      for (int i = 0; i < R; i++) total[i][v] += value * weight[i][j];
    }
  for (int i = 0; i < R; i++)
    for (int v = 0; v < Width; v++) store(&s.sums[guest[i].row * dim + d + v * kLanes], total[i][v]);
}

// Online softmax (Milakov and Gimelshein 2018, algorithm 3). What a row must not see has weight 0, exactly.
template <int R, class Element>
inline void meet(const Guest<Element>* guest, const Heads& heads, Scratch<Element>& s) {
  constexpr int each = kInWord<Element>;
  const int dim = heads.dim;
  Floats scores[R], odd[R];  // two sums, so that a product need not wait for the one before
  for (int i = 0; i < R; i++) scores[i] = odd[i] = Floats{};
  for (int d = 0; d < dim / each; d += 2) {
    const Ints keys = load(&s.keys[d * kLanes]), next = load(&s.keys[(d + 1) * kLanes]);
    for (int i = 0; i < R; i++) {
      int32_t word[2];
      std::memcpy(word, guest[i].query + each * d, sizeof word);
      scores[i] = dot_words<Element>(scores[i], keys, fill(word[0]));
      odd[i] = dot_words<Element>(odd[i], next, fill(word[1]));
    }
  }
  for (int i = 0; i < R; i++) scores[i] += odd[i];
  float keep[R], weight[R][kLanes];
  for (int i = 0; i < R; i++) {
    float& most = s.most[guest[i].row];
    float* mass = &s.mass[guest[i].row * kLanes];
    const auto visible = (lanes() >= guest[i].low) & (lanes() < guest[i].count);
    const Floats seen = visible ? scores[i] * heads.scale : fill(-INFINITY);
    const float before = most, found = largest(seen);
    most = found > before ? found : before;
    const Floats weights = exponential(seen - most);
    keep[i] = before == most ? 1.0f : exponential(fill(before - most))[0];
    store(mass, load(mass) * keep[i] + weights);
    store(weight[i], weights);
  }
  int d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) mix<R, 4>(guest, weight, keep, d, dim, s);
  for (; d < dim; d += kLanes) mix<R, 1>(guest, weight, keep, d, dim, s);
}

template <class Element>
inline void meet_all(std::vector<Guest<Element>>& guests, const Heads& heads, Scratch<Element>& s) {
  const Guest<Element>* guest = guests.data();
  const Guest<Element>* end = guest + guests.size();
  for (; guest + 4 <= end; guest += 4) meet<4>(guest, heads, s);
  if (end - guest == 3) meet<3>(guest, heads, s);
  if (end - guest == 2) meet<2>(guest, heads, s);
  if (end - guest == 1) meet<1>(guest, heads, s);
  guests.clear();
}

// out [columns][query heads * dim], of the query heads that share key head `head`; query lies alike.
template <class Element>
inline void attend(const Columns& columns, const Tile& tile, int head, const Heads& heads,
                   const Entries<Element>& entries, const Element* query, float* out, Scratch<Element>& s) {
  const int sharing = heads.query / heads.key, width = heads.query * heads.dim;
  const int rows = (tile.last - tile.first) * sharing;
  std::fill(s.most, s.most + rows, -INFINITY);
  std::fill(s.mass, s.mass + rows * kLanes, 0.0f);
  std::fill(s.sums.begin(), s.sums.begin() + size_t(rows) * heads.dim, 0.0f);
  int end = 0;
  for (int c = tile.first; c < tile.last; c++)
    end = std::max(end, columns.seen[c] + columns.tail_begin[c + 1] - columns.tail_begin[c]);
  for (int begin = 0; begin < end; begin += kLanes) {
    int64_t at[kLanes];
    int most = 0;  // entries that some column sees as they lie
    for (int c = tile.first; c < tile.last; c++) {
      const int tail = columns.tail_begin[c + 1] - columns.tail_begin[c], seen = columns.seen[c];
      const int count = std::min(kLanes, seen + tail - begin);
      const int low = heads.window ? std::max(0, columns.position[c] + 1 - heads.window - begin) : 0;
      if (low >= count) continue;
      const Element* queries = query + size_t(c) * width + size_t(head) * sharing * heads.dim;
      auto& guests = seen < begin + count ? s.own : s.guests;
      for (int g = 0; g < sharing; g++)
        guests.push_back({queries + g * heads.dim, (c - tile.first) * sharing + g, low, count});
      if (s.own.empty()) {
        most = std::max(most, count);
        continue;
      }
      for (int j = 0; j < count; j++)
        at[j] = entries.at(begin + j < seen ? begin + j : columns.tail[columns.tail_begin[c] + begin + j - seen]);
      gather(entries, at, count, kLanes, heads.dim, s);
      meet_all(s.own, heads, s);
    }
    if (s.guests.empty()) continue;
    const int64_t first = entries.at(begin), ahead = begin + kLanes < end ? entries.at(begin + kLanes) - first : 0;
    for (int j = 0; j < most; j++) at[j] = first + j;
    gather(entries, at, most, ahead, heads.dim, s);
    meet_all(s.guests, heads, s);
  }
  for (int c = tile.first; c < tile.last; c++)
    for (int g = 0; g < sharing; g++) {
      const int r = (c - tile.first) * sharing + g;
      float* to = out + size_t(c) * width + size_t(head * sharing + g) * heads.dim;
      const float mass = sum(load(&s.mass[r * kLanes]));
      for (int d = 0; d < heads.dim; d += kLanes) store(to + d, load(&s.sums[size_t(r) * heads.dim + d]) / mass);
    }
}

}  // namespace outrider
