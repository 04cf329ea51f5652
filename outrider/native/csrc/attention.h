// Attention of a pass over the cache, one tile of columns and one key head at a time.
//
// A slot's entries lie in blocks, which a table names in the order of the text. A column sees the first `seen` entries of
// its slot and then the entries that its tail names. Entries are taken in that order, a block's number at a time, so that
// the sums of a guess in a tree are those of the same token in a chain, and those of the same token alone, wherever its
// blocks lie: not nearly, bit for bit.
//
// Within a block keys and values lie as they are multiplied. Keys by sixteen entries, one a lane: [kBlock / 16][dim /
// kInWord][16] words, so that scores come out side by side. Values by words of neighbouring entries: [kBlock /
// kInWord][dim] words, so that bfloat16 is weighted in pairs.
#pragma once

#include <cmath>
#include <vector>

#include "simd.h"

namespace outrider {

// Rows of a tile: columns times the query heads that share a key head, which are no more than this, as abi.py has it.
constexpr int kQueries = 48;
constexpr int kBlock = 64;    // entries of a block, as cache/paged.py has it
constexpr int kGroups = kBlock / kLanes;
// Parts whose scores are summed at once, and parts of sums to which values are added at once: as many as registers hold.
constexpr int kTogether = kPart == kLanes ? 2 : 1, kWide = 2 * kTogether;

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

// Elements of a word: products are taken word by word.
template <class Element>
constexpr int kInWord = 4 / sizeof(Element);

// What one slot has of one layer, from key head 0 on. Elements are bfloat16, or float where the model is.
template <class Element>
struct Entries {
  Element* first;        // of block 0
  const int32_t* table;  // the slot's blocks
  int64_t stride;        // from one block to the next, in elements
  int dim;

  static constexpr int kEach = kInWord<Element>;

  // A head's keys in the block of an entry; its values lie behind them.
  Element* keys(uint32_t entry, int head) const {
    return first + table[entry / kBlock] * stride + int64_t(2 * head) * kBlock * dim;
  }
  Element* values(uint32_t entry, int head) const { return keys(entry, head) + kBlock * dim; }

  // Element i of an entry's key lies at key(entry, head)[key_at(i)], and so for values.
  Element* key(uint32_t entry, int head) const { return keys(entry, head) + key_in(entry % kBlock); }
  Element* value(uint32_t entry, int head) const { return values(entry, head) + value_in(entry % kBlock); }
  int key_in(int in) const { return in / kLanes * dim * kLanes + in % kLanes * kEach; }
  int value_in(int in) const { return in / kEach * dim * kEach + in % kEach; }
  static int key_at(int i) { return i / kEach * kLanes * kEach + i % kEach; }
  static int value_at(int i) { return i * kEach; }
};

// A query row that waits to meet the entries low .. count - 1 of some that lie as in a block.
template <class Element>
struct Guest {
  const Element* query;  // [dim]
  int row, low, count;
};

// What guests meet, and what will be met after it, if that is known.
template <class Element>
struct Block {
  const Element *keys, *values, *next_values, *next_keys;
};

template <class Element>
struct Scratch {
  std::vector<float> sums;
  std::vector<Element> keys, values;        // entries that lay elsewhere
  std::vector<Guest<Element>> guests, own;  // who meets the entries as they lie, and who brings entries of its own
  float most[kQueries], mass[kQueries * kLanes];
  explicit Scratch(int dim) : sums(kQueries * dim), keys(kBlock * dim), values(kBlock * dim) {}
};

template <class Element>
inline IntPart words(const Element* from) {
  IntPart out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

// Ask for what will be read soon, a little at a time beside the arithmetic: where the next block lies no processor
// foresees, and asked for all at once it would come no sooner.
template <class Element>
inline void foresee(const Element* from) {
  __builtin_prefetch(from);
}

template <class Element>
inline IntPart fill_word(const Element* from) {
  int32_t word;
  std::memcpy(&word, from, sizeof word);
  return IntPart{} + word;
}

// Put the entries seen by a column, `begin` and so many on, where it meets them: first those that lie in order.
template <class Element>
inline void gather(const Entries<Element>& from, int head, const Columns& columns, int column, int begin, int count,
                   Scratch<Element>& s) {
  const int dim = from.dim, seen = columns.seen[column] - begin;
  const int whole = std::max(0, std::min(seen, count)) / kLanes * kLanes;
  if (whole) {
    std::memcpy(s.keys.data(), from.keys(begin, head), sizeof(Element) * whole * dim);
    std::memcpy(s.values.data(), from.values(begin, head), sizeof(Element) * whole * dim);
  }
  for (int j = whole; j < count; j++) {
    const uint32_t entry = j < seen ? begin + j : columns.tail[columns.tail_begin[column] + j - seen];
    const Element *key = from.key(entry, head), *value = from.value(entry, head);
    Element *to_key = &s.keys[from.key_in(j)], *to_value = &s.values[from.value_in(j)];
    for (int i = 0; i < dim; i += kInWord<Element>) std::memcpy(to_key + from.key_at(i), key + from.key_at(i), 4);
    for (int i = 0; i < dim; i++) to_value[from.value_at(i)] = value[from.value_at(i)];
  }
}

// scores[i][g] = sixteen entries' products with row i's query.
template <int R, class Element>
inline void score(const Guest<Element>* guest, const Block<Element>& block, int groups, int dim,
                  Floats (&scores)[R][kGroups]) {
  constexpr int each = kInWord<Element>, split = kLanes / kPart, whole = std::max(kTogether / split, 1);
  for (int p = 0; p < groups * split; p += kTogether) {
    FloatPart even[R][kTogether] = {}, odd[R][kTogether] = {};  // two sums, so that no product waits for the one before
    const size_t begin = size_t(p / split) * dim * kLanes;
    const Element *from = block.keys + begin + p % split * kPart * each,
                  *ahead = block.next_values && p % split == 0 ? block.next_values + begin : nullptr;
    for (int d = 0; d < dim; d += 2 * each) {
      for (int a = 0; ahead && a < 2 * whole; a++) foresee(ahead + (d * whole + a * each) * kLanes);
      IntPart key[kTogether], next[kTogether];
      for (int a = 0; a < kTogether; a++) {
        key[a] = words(from + (a * dim + d) * kLanes);
        next[a] = words(from + (a * dim + d + each) * kLanes);
      }
      for (int i = 0; i < R; i++) {
        const IntPart query = fill_word(guest[i].query + d), follows = fill_word(guest[i].query + d + each);
        for (int a = 0; a < kTogether; a++) {
          even[i][a] = dot_words<Element>(even[i][a], key[a], query);
          odd[i][a] = dot_words<Element>(odd[i][a], next[a], follows);
        }
      }
    }
    for (int i = 0; i < R; i++)
      for (int a = 0; a < kTogether; a++)
        store(reinterpret_cast<float*>(scores[i]) + (p + a) * kPart, even[i][a] + odd[i][a]);
  }
}

// sums += weights * values of `count` entries, for Width parts of each of R rows.
template <int R, int Width, class Element>
inline void mix(const Guest<Element>* guest, const Element (&weight)[R][kBlock], const float (&keep)[R],
                const Block<Element>& block, int count, int d, int dim, Scratch<Element>& s) {
  constexpr int each = kInWord<Element>;
  FloatPart total[R][Width];
  for (int i = 0; i < R; i++)
    for (int v = 0; v < Width; v++) total[i][v] = load_part(&s.sums[guest[i].row * dim + d + v * kPart]) * keep[i];
  const auto add = [&](int j, int32_t mask) {
    IntPart value[Width];
    for (int v = 0; v < Width; v++) value[v] = words(block.values + j * dim + (d + v * kPart) * each) & mask;
    for (int i = 0; i < R; i++) {
      const IntPart weights = fill_word(weight[i] + j);
      for (int v = 0; v < Width; v++) total[i][v] = dot_words<Element>(total[i][v], value[v], weights);
    }
  };
  int j = 0;
  for (; j + each <= count; j += each) {
    for (int v = 0; block.next_keys && v < Width; v++) foresee(block.next_keys + j * dim + (d + v * kPart) * each);
    add(j, -1);
  }
  if (j < count) add(j, 0xffff);  // its neighbour is nobody's, and need not be a number
  for (int i = 0; i < R; i++)
    for (int v = 0; v < Width; v++) store(&s.sums[guest[i].row * dim + d + v * kPart], total[i][v]);
}

// Online softmax (Milakov and Gimelshein 2018, algorithm 3). What a row must not see has weight 0, exactly. Weights are
// rounded as values are, and their mass is that of the rounded ones.
template <int R, class Element>
inline void meet(const Guest<Element>* guest, const Heads& heads, const Block<Element>& block, Scratch<Element>& s) {
  const int dim = heads.dim;
  int count = 0;
  for (int i = 0; i < R; i++) count = std::max(count, guest[i].count);
  const int groups = (count + kLanes - 1) / kLanes;
  Floats scores[R][kGroups];
  score<R>(guest, block, groups, dim, scores);
  float keep[R];
  Element weight[R][kBlock];
  for (int i = 0; i < R; i++) {
    float& most = s.most[guest[i].row];
    Floats top = fill(-INFINITY);
    for (int g = 0; g < groups; g++) {
      const Ints at = lanes() + g * kLanes;
      const auto visible = (at >= guest[i].low) & (at < guest[i].count);
      scores[i][g] = visible ? scores[i][g] * heads.scale : fill(-INFINITY);
      top = maximum(top, scores[i][g]);
    }
    const float before = most, found = largest(top);
    most = found > before ? found : before;
    keep[i] = before == most ? 1.0f : exponential(fill(before - most))[0];
    float* mass = &s.mass[guest[i].row * kLanes];
    Floats sum = load(mass) * keep[i];
    for (int g = 0; g < groups; g++) sum += round_to(weight[i] + g * kLanes, exponential(scores[i][g] - most));
    store(mass, sum);
  }
  int d = 0;
  for (; d + kWide * kPart <= dim; d += kWide * kPart) mix<R, kWide>(guest, weight, keep, block, count, d, dim, s);
  for (; d < dim; d += kPart) mix<R, 1>(guest, weight, keep, block, count, d, dim, s);
}

template <class Element>
inline void meet_all(std::vector<Guest<Element>>& guests, const Heads& heads, Block<Element> block,
                     Scratch<Element>& s) {
  const Guest<Element>* guest = guests.data();
  const Guest<Element>* end = guest + guests.size();
  for (; guest + 4 <= end; guest += 4) {
    meet<4>(guest, heads, block, s);
    block.next_values = block.next_keys = nullptr;  // they have been asked for
  }
  if (end - guest == 3) meet<3>(guest, heads, block, s);
  if (end - guest == 2) meet<2>(guest, heads, block, s);
  if (end - guest == 1) meet<1>(guest, heads, block, s);
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
  for (int begin = 0; begin < end; begin += kBlock) {
    for (int c = tile.first; c < tile.last; c++) {
      const int tail = columns.tail_begin[c + 1] - columns.tail_begin[c], seen = columns.seen[c];
      const int count = std::min(kBlock, seen + tail - begin);
      const int low = heads.window ? std::max(0, columns.position[c] + 1 - heads.window - begin) : 0;
      if (low >= count) continue;
      const Element* queries = query + size_t(c) * width + size_t(head) * sharing * heads.dim;
      auto& guests = seen < begin + count ? s.own : s.guests;
      for (int g = 0; g < sharing; g++)
        guests.push_back({queries + g * heads.dim, (c - tile.first) * sharing + g, low, count});
      if (s.own.empty()) continue;
      gather(entries, head, columns, c, begin, count, s);
      meet_all(s.own, heads, {s.keys.data(), s.values.data(), nullptr, nullptr}, s);
    }
    if (s.guests.empty()) continue;
    const Element *keys = entries.keys(begin, head), *values = entries.values(begin, head);
    meet_all(s.guests, heads, {keys, values, values, begin + kBlock < end ? entries.keys(begin + kBlock, head) : nullptr},
             s);
  }
  for (int r = 0; r < rows; r++) {
    float* to = out + size_t(tile.first + r / sharing) * width + size_t(head * sharing + r % sharing) * heads.dim;
    const float mass = sum(load(&s.mass[r * kLanes]));
    for (int d = 0; d < heads.dim; d += kLanes) store(to + d, load(&s.sums[size_t(r) * heads.dim + d]) / mass);
  }
}

}  // namespace outrider
