// Attention over the KV cache, for one tile of columns and one key head at a time.
//
// The entries of a slot are stored in blocks. A block table lists the blocks in the order of the sequence. A column
// attends to the first `prefix` entries of its slot and then to the entries in its tail. The kernel processes the
// entries in this order, one block length at a time. A draft token in a tree therefore has bit for bit the same sums as
// the same token in a chain or in the committed text, wherever its blocks are. Each section of some blocks has sums of its
// own, which are then added in order. So threads can share the sections of a long text, and their number changes no bit.
//
// Within a block, keys and values are stored in the order of the multiplications. Keys are grouped by sixteen entries,
// one entry per lane: [kBlock / 16][dim / kPerWord][16] words. The scores of sixteen entries are then in one vector.
// Values are grouped by words of neighboring entries: [kBlock / kPerWord][dim] words. bfloat16 values are then weighted
// in pairs.
//
// A cache of bytes has a scale for each key and each value. Bytes are widened to 16 bits and multiplied in pairs, too.
// Queries and weights are then rounded to integers of 16 bits, with a scale for each query and for the weights of a
// block, so products and their sums are exact.
//
// The matrix units (AMX) multiply whole blocks of a bfloat16 cache, if the processor has them. A block is whole for a
// column that attends to all of its entries. This depends on the column alone, so its sums have the same order in every
// pass.
#pragma once

#include <cmath>
#include <vector>

#include "matrix.h"
#include "simd.h"

namespace outrider {

// Maximum rows of a tile: columns times the query heads that share a key head. MAX_QUERIES_PER_KEY_HEAD in support.py.
constexpr int kMaxTileRows = 48;
constexpr int kMaxHeadDim = 256;  // MAX_HEAD_DIM in support.py
constexpr int kBlock = 64;  // entries of a block, as in models/cache/paged.py
constexpr int kGroups = kBlock / kLanes;
constexpr int kSection = 8 * kBlock;  // entries of a section
// Whether keys and values are integers.
template <class Element>
constexpr bool kIntegers = std::is_same_v<Element, int8_t>;

// Sums of a score, so that a product of floats does not wait for the one before it. They add up every second word.
template <class Element>
constexpr int kSums = kIntegers<Element> ? 1 : 2;

// Rows, and registers of scores or of outputs for each, whose sums fit into registers.
constexpr int kRowsAtOnce = 6;
constexpr int kRegs = kRegLanes == kLanes ? 4 : 2;

// The entries that each column of a pass attends to.
struct Columns {
  const int32_t* position;
  const int32_t* prefix;      // number of leading entries of the slot
  const int32_t* tail_begin;  // [columns + 1] into `tail`
  const int32_t* tail;        // further entries of the slot, in order of depth
};

struct Heads {
  int query, key, dim;
  float scale;
  float cap;   // scores are limited to -cap .. cap; 0: no limit
  int window;  // maximum entries that a column attends to, including itself; 0: no limit

  FloatReg score(FloatReg product) const { return cap ? capped(product * scale, cap) : product * scale; }
};

// Columns first .. last - 1, all of one slot.
struct Tile {
  int first, last;
};

// Elements of a 32-bit word, into which bytes are widened. Products are computed word by word.
template <class Element>
constexpr int kPerWord = sizeof(Element) == 4 ? 1 : 2;

// The type of queries and of weights, which are multiplied with elements.
template <class Element>
using Factor = std::conditional_t<kIntegers<Element>, int16_t, Input<Element>>;

template <class Element>
using SumReg = std::conditional_t<kIntegers<Element>, IntReg, FloatReg>;

// Elements of the keys or the values of a head in a block. The scales of bytes follow them: [kBlock] floats.
template <class Element>
constexpr int64_t part_size(int dim) { return int64_t(kBlock) * (dim + (kIntegers<Element> ? sizeof(float) : 0)); }

inline float* scales_of(int8_t* part, int dim) { return reinterpret_cast<float*>(part + kBlock * dim); }
inline const float* scales_of(const int8_t* part, int dim) { return scales_of(const_cast<int8_t*>(part), dim); }

// Round numbers to elements. Return their scale.
template <class Element>
inline float round_all(const float* x, int count, Element* out) {
  for (int i = 0; i < count; i++) set(out[i], x[i]);
  return 1;
}
inline float round_all(const float* x, int count, int8_t* out) { return to_integers(x, count, out); }
inline float round_all(const float* x, int count, int16_t* out) { return to_integers(x, count, out); }

// The keys and values of one slot in one layer. Elements are bytes, bfloat16, or float in a float32 model.
template <class Element>
struct Entries {
  Element* first;        // key head 0 of block 0
  const int32_t* table;  // block table of the slot
  int64_t stride;        // elements from one block to the next
  int dim;

  static constexpr int kEach = kPerWord<Element>;

  // Return the keys of a head in the block that holds `entry`. The values of the head follow them.
  Element* keys(uint32_t entry, int head) const {
    return first + table[entry / kBlock] * stride + 2 * head * part_size<Element>(dim);
  }
  Element* values(uint32_t entry, int head) const { return keys(entry, head) + part_size<Element>(dim); }

  // Write the key or the value of an entry.
  void set_key(uint32_t entry, int head, const float* x) const {
    write(keys(entry, head), entry, key_start(entry % kBlock), key_offset, x);
  }
  void set_value(uint32_t entry, int head, const float* x) const {
    write(values(entry, head), entry, value_start(entry % kBlock), value_offset, x);
  }

  template <class Offset>
  void write(Element* part, uint32_t entry, int start, Offset offset, const float* x) const {
    alignas(64) Element rounded[kMaxHeadDim];
    const float scale = round_all(x, dim, rounded);
    for (int i = 0; i < dim; i++) part[start + offset(i)] = rounded[i];
    if constexpr (kIntegers<Element>) scales_of(part, dim)[entry % kBlock] = scale;
  }

  // Element i of the key of an entry is key(entry, head)[key_offset(i)]. The same holds for values.
  Element* key(uint32_t entry, int head) const { return keys(entry, head) + key_start(entry % kBlock); }
  Element* value(uint32_t entry, int head) const { return values(entry, head) + value_start(entry % kBlock); }
  int key_start(int j) const { return j / kLanes * dim * kLanes + j % kLanes * kEach; }
  int value_start(int j) const { return j / kEach * dim * kEach + j % kEach; }
  static int key_offset(int i) { return i / kEach * kLanes * kEach + i % kEach; }
  static int value_offset(int i) { return i * kEach; }
};

// A query row that attends to the entries low .. count - 1 of a block.
template <class Element>
struct QueryRow {
  const Factor<Element>* query;  // [dim]
  float scale;                   // of the query
  int row, low, count;
};

// The queries of a pass.
template <class Element>
struct Queries {
  const Factor<Element>* query;  // [columns][query heads][dim]
  const float* scale;            // [columns][query heads]
};

// The weights of the values of a block, for R rows.
template <int R, class Element>
struct Weights {
  Factor<Element> weight[R][kBlock] = {};  // a row may attend to fewer groups than another one
  float scale[R];                          // of the weights, with integers
  float rescale[R];                        // factors of the sums of the blocks before
};

// The block that rows attend to, and the addresses to prefetch; null: nothing to prefetch.
template <class Element>
struct Block {
  const Element *keys, *values, *next_values, *next_keys;
};

// The sums of some entries, for the rows of a tile: [rows][row_size]. A row has its weighted values, [dim], the sums of
// weights, [kLanes], and the largest score.
struct Sums {
  float* first;
  int dim;

  static constexpr int row_size(int dim) { return dim + 2 * kLanes; }
  float* values(int row) const { return first + size_t(row) * row_size(dim); }
  float* mass(int row) const { return values(row) + dim; }
  float& max(int row) const { return mass(row)[kLanes]; }

  void clear(int rows) const {
    std::fill(first, first + size_t(rows) * row_size(dim), 0.0f);
    for (int r = 0; r < rows; r++) max(r) = -INFINITY;
  }
};

// Buffers of one thread.
template <class Element>
struct Scratch {
  Sums sums;                                         // of the section that the thread attends to
  std::vector<float> section, all;                      // [kMaxTileRows][row_size] sums of a section, and of all sections
  std::vector<Element> keys, values;                 // a block of gathered entries, as in the cache
  std::vector<Factor<Element>> queries;              // [rows][dim]
  std::vector<QueryRow<Element>> in_place, gathered;  // rows that read a block of the cache; rows with gathered entries
  explicit Scratch(int dim)
      : section(kMaxTileRows * Sums::row_size(dim)),
        all(section),
        keys(part_size<Element>(dim)),
        values(part_size<Element>(dim)),
        queries(kMaxTileRows * dim) {}
};

// Return what the factors of part `part` of the words of a register are multiplied with.
template <class Element>
inline IntReg load_words(const Element* from, int part) {
  if constexpr (kIntegers<Element>) {
    return widen(from);
  } else {
    IntReg out;
    std::memcpy(&out, from, sizeof out);
    return kParts<Element> == 1 ? out : half_of(out, part);
  }
}

// Prefetch one cache line. The processor cannot predict where the next block is. Prefetches are spread over the
// arithmetic, since a burst of them would not arrive earlier.
template <class Element>
inline void prefetch(const Element* from) {
  __builtin_prefetch(from);
}

// Return word number `word` of some factors in all lanes.
template <class Number>
inline IntReg broadcast_word(const Number* factors, int word) {
  int32_t out;
  std::memcpy(&out, reinterpret_cast<const char*>(factors) + sizeof out * word, sizeof out);
  return IntReg{} + out;
}

// Copy `count` of the entries that a column attends to, from number `begin` on, into one block. Whole groups of the
// prefix are copied first.
template <class Element>
inline void gather_entries(const Entries<Element>& from, int head, const Columns& columns, int column, int begin,
                           int count, Scratch<Element>& s) {
  const int dim = from.dim;
  const int prefix = columns.prefix[column] - begin;
  const int copied = std::max(0, std::min(prefix, count)) / kLanes * kLanes;
  if (copied) {
    std::memcpy(s.keys.data(), from.keys(begin, head), sizeof(Element) * copied * dim);
    std::memcpy(s.values.data(), from.values(begin, head), sizeof(Element) * copied * dim);
  }
  const auto copy_scale = [&](int j, uint32_t entry) {
    if constexpr (kIntegers<Element>) {
      scales_of(s.keys.data(), dim)[j] = scales_of(from.keys(entry, head), dim)[entry % kBlock];
      scales_of(s.values.data(), dim)[j] = scales_of(from.values(entry, head), dim)[entry % kBlock];
    }
  };
  for (int j = 0; j < copied; j++) copy_scale(j, begin + j);
  for (int j = copied; j < count; j++) {
    const uint32_t entry = j < prefix ? begin + j : columns.tail[columns.tail_begin[column] + j - prefix];
    const Element* key = from.key(entry, head);
    const Element* value = from.value(entry, head);
    Element* to_key = &s.keys[from.key_start(j)];
    Element* to_value = &s.values[from.value_start(j)];
    for (int i = 0; i < dim; i += kPerWord<Element>)
      std::memcpy(to_key + from.key_offset(i), key + from.key_offset(i), sizeof(Element) * kPerWord<Element>);
    for (int i = 0; i < dim; i++) to_value[from.value_offset(i)] = value[from.value_offset(i)];
    copy_scale(j, entry);
  }
}

// scores[i][j] = product of the query of row i with key j of the block.
template <int R, class Element>
inline void compute_scores(const QueryRow<Element>* rows, const Block<Element>& block, int groups, int dim,
                           float (&scores)[R][kBlock]) {
  constexpr int each = kPerWord<Element>, parts = kParts<Element>;
  constexpr int turns = R > kRowsAtOnce / 2 ? kSums<Element> : 1;  // that compute a part of the sums
  constexpr int sums = kSums<Element> / turns;                     // of a score in a turn
  constexpr int words = 2 / turns;                                 // of a key that a turn reads, of two
  constexpr int regs_per_group = kLanes / kRegLanes;
  constexpr int lines = words * each * kLanes * sizeof(Element) / 64 * std::max(kRegs / regs_per_group, 1);
  for (int p = 0; p < groups * regs_per_group; p += kRegs) {
    const size_t begin = size_t(p / regs_per_group) * dim * kLanes;
    const Element* from = block.keys + begin + p % regs_per_group * kRegLanes * each;
    const Element* ahead = block.next_values && p % regs_per_group == 0 ? block.next_values + begin : nullptr;
    for (int turn = 0; turn < turns; turn++) {
      SumReg<Element> sum[sums][R][kRegs] = {};
      for (int first = turn; first < dim / each; first += 2) {
        for (int a = 0; ahead && a < lines; a++, ahead += 64 / sizeof(Element)) prefetch(ahead);
        for (int word = 0; word < words; word++)
          for (int part = 0; part < parts; part++) {
            IntReg keys[kRegs];
            for (int a = 0; a < kRegs; a++)
              keys[a] = load_words(from + (a / regs_per_group * dim + (first + word) * each) * kLanes +
                                       a % regs_per_group * kRegLanes * each,
                                   part);
            for (int i = 0; i < R; i++) {
              const IntReg query = broadcast_word(rows[i].query, (first + word) * parts + part);
              for (int a = 0; a < kRegs; a++) {
                auto& to = sum[word % sums][i][a];
                to = dot_words<Factor<Element>>(to, keys[a], query);
              }
            }
          }
      }
      for (int i = 0; i < R; i++)
        for (int a = 0; a < kRegs; a++) {
          float* to = scores[i] + (p + a) * kRegLanes;
          if constexpr (kIntegers<Element>) {
            const FloatReg scale = load_reg(scales_of(block.keys, dim) + (p + a) * kRegLanes) * rows[i].scale;
            store(to, __builtin_convertvector(sum[0][i][a], FloatReg) * scale);
          } else {
            store(to, turn ? load_reg(to) + sum[0][i][a] : sums == 1 ? sum[0][i][a] : sum[0][i][a] + sum[sums - 1][i][a]);
          }
        }
    }
  }
}

// sums = sums * rescale + weights * values of `count` entries, for Width registers of each of R rows.
template <int R, int Width, class Element>
inline void add_values(const QueryRow<Element>* rows, const Weights<R, Element>& weights, const Block<Element>& block,
                       int count, int d, int dim, Scratch<Element>& s) {
  constexpr int each = kPerWord<Element>, parts = kParts<Element>;
  constexpr int step = R > kRowsAtOnce / 2 ? 1 : 2;         // words at a time; more registers would be needed for two
  constexpr int read = Width * kRegLanes * each;            // elements that a word reads
  SumReg<Element> total[R][Width] = {};
  if constexpr (!kIntegers<Element>)
    for (int i = 0; i < R; i++)
      for (int v = 0; v < Width; v++)
        total[i][v] = load_reg(s.sums.values(rows[i].row) + d + v * kRegLanes) * weights.rescale[i];
  const auto add = [&](int word, int num_parts, int32_t mask) {
    for (int part = 0; part < num_parts; part++) {
      IntReg value[Width];
      for (int v = 0; v < Width; v++)
        value[v] = load_words(block.values + (word * dim + d + v * kRegLanes) * each, part) & mask;
      for (int i = 0; i < R; i++) {
        const IntReg weight = broadcast_word(weights.weight[i], word * parts + part);
        for (int v = 0; v < Width; v++) total[i][v] = dot_words<Factor<Element>>(total[i][v], value[v], weight);
      }
    }
  };
  int word = 0;
  for (; word + step <= count / each; word += step) {
    for (int a = 0; block.next_keys && a < step * read; a += 64 / sizeof(Element))
      prefetch(block.next_keys + d * kBlock + word * read + a);
    for (int i = 0; i < step; i++) add(word + i, parts, -1);
  }
  if (word < count / each) add(word++, parts, -1);
  // The second element of the last word may be unused memory, and NaN.
  if (word * each < count) add(word, 1, parts == 1 ? 0xffff : -1);
  for (int i = 0; i < R; i++) {
    float* sums = s.sums.values(rows[i].row) + d;
    const float scale = weights.scale[i], rescale = weights.rescale[i];
    for (int v = 0; v < Width; v++, sums += kRegLanes)
      if constexpr (kIntegers<Element>)
        store(sums, load_reg(sums) * rescale + __builtin_convertvector(total[i][v], FloatReg) * scale);
      else
        store(sums, total[i][v]);
  }
}

// Turn the products of whole groups into scores. Scores of the entries low .. count - 1 are used; others are -inf. Return the
// largest one.
inline float finish_scores(const Heads& heads, int low, int count, float* scores) {
  const int size = (count + kLanes - 1) / kLanes * kLanes;
  const FloatReg masked = FloatReg{} - INFINITY;
  FloatReg most = masked;
  for (int j = 0; j < size; j += kRegLanes) {
    FloatReg score = heads.score(load_reg(scores + j));
    if (low > j || count < j + kRegLanes) {
      const IntReg at = reg_lanes() + j;
      score = (at >= low) & (at < count) ? score : masked;
    }
    store(scores + j, score);
    most = maximum(most, score);
  }
  return reduce(most, [](auto a, auto b) { return maximum(a, b); });
}

// The largest scores of some rows.
template <int N>
struct Maxima {
  float max[N];
  float rescale[N];  // the factors of the sums so far
  float weight[N];   // the largest weights of the block
};

// Online softmax (Milakov and Gimelshein 2018, algorithm 3) computes the weights of a block in two steps. The first one
// updates the largest score of each row with that of the block.
template <int N>
inline Maxima<N> update_max(const float (&max)[N], const float (&block_max)[N]) {
  Maxima<N> out;
  FloatReg change[N / kRegLanes], factor[N / kRegLanes];
  for (int r = 0; r < N / kRegLanes; r++) {
    change[r] = load_reg(block_max + r * kRegLanes) - load_reg(max + r * kRegLanes);
    factor[r] = change[r] > 0 ? -change[r] : change[r];
  }
  exponentials(factor);
  for (int r = 0; r < N / kRegLanes; r++) {
    const FloatReg one = FloatReg{} + 1;
    store(out.max + r * kRegLanes, maximum(load_reg(block_max + r * kRegLanes), load_reg(max + r * kRegLanes)));
    store(out.rescale + r * kRegLanes, change[r] > 0 ? factor[r] : one);
    store(out.weight + r * kRegLanes, change[r] > 0 ? one : factor[r]);
  }
  return out;
}

// The second step turns the scores of `count` entries into weights. `keep` rounds those in a register to the type of the
// values, and returns what `mass` sums. A score of -inf gets weight 0, exactly.
template <class Keep>
inline void write_weights(int count, const float* scores, float max, float rescale, float* mass, Keep keep) {
  const int size = (count + kLanes - 1) / kLanes * kLanes;
  constexpr int regs = kLanes / kRegLanes;
  FloatReg sum[regs];
  for (int r = 0; r < regs; r++) sum[r] = load_reg(mass + r * kRegLanes) * rescale;
  const auto write = [&](int begin, auto groups) {
    FloatReg x[groups * regs];
    for (int r = 0; r < groups * regs; r++) x[r] = load_reg(scores + begin + r * kRegLanes) - max;
    exponentials(x);
    for (int r = 0; r < groups * regs; r++) sum[r % regs] += keep(begin + r * kRegLanes, x[r]);
  };
  int j = 0;
  for (; j + 2 * kLanes <= size; j += 2 * kLanes) write(j, std::integral_constant<int, 2>());
  if (j < size) write(j, std::integral_constant<int, 1>());
  for (int r = 0; r < regs; r++) store(mass + r * kRegLanes, sum[r]);
}

// Return the largest of the scales of `count` entries, or NaN.
inline float largest_scale(const float* scales, int count) {
  FloatReg most = {};
  for (int j = 0; j < count; j += kRegLanes)
    most = maximum_or_nan(most, reg_lanes() + j < count ? load_reg(scales + j) : FloatReg{});
  return reduce(most, [](auto a, auto b) { return maximum_or_nan(a, b); });
}

// Update R rows with one block.
template <int R, class Element>
inline void attend_block(const QueryRow<Element>* rows, const Heads& heads, const Block<Element>& block,
                         Scratch<Element>& s) {
  const int dim = heads.dim;
  int count = 0;
  for (int i = 0; i < R; i++) count = std::max(count, rows[i].count);
  const int groups = (count + kLanes - 1) / kLanes;
  float scores[R][kBlock];
  compute_scores<R>(rows, block, groups, dim, scores);
  Weights<R, Element> weights;
  float max[kLanes] = {}, block_max[kLanes] = {};
  for (int i = 0; i < R; i++) {
    max[i] = s.sums.max(rows[i].row);
    block_max[i] = finish_scores(heads, rows[i].low, rows[i].count, scores[i]);
  }
  const auto maxima = update_max(max, block_max);
  float value_scale = 0;
  for (int i = 0; i < R; i++) {
    const int row = rows[i].row;
    s.sums.max(row) = maxima.max[i];
    weights.rescale[i] = maxima.rescale[i];
    Factor<Element>* weight = weights.weight[i];
    const auto write = [&](auto keep) {
      write_weights(rows[i].count, scores[i], maxima.max[i], weights.rescale[i], s.sums.mass(row), keep);
    };
    if constexpr (kIntegers<Element>) {
      // The largest product of a weight and a scale is not larger than the product of the largest ones.
      const float* scales = scales_of(block.values, dim);
      if (!i || rows[i].count != rows[i - 1].count) value_scale = largest_scale(scales, rows[i].count);
      constexpr float most = std::numeric_limits<int16_t>::max();
      const float size = value_scale * maxima.weight[i];
      const float inverse = size > 1e-30f ? most / size : 0;
      weights.scale[i] = size * (1 / most);
      write([&](int j, FloatReg x) {
        typedef int16_t Shorts __attribute__((vector_size(2 * kRegLanes)));
        // An unused entry has weight 0, and its scale may be NaN.
        const FloatReg scaled = x != 0 ? x * (load_reg(scales + j) * inverse) : x;
        store(weight + j, __builtin_convertvector(to_nearest(scaled), Shorts));
        return x;
      });
    } else {
      write([&](int j, FloatReg x) { return store_rounded(weight + j, x); });
    }
  }
  constexpr int width = R > (kIntegers<Element> ? 2 : 3) ? kRegs : 2 * kRegs;
  int d = 0;
  for (; d + width * kRegLanes <= dim; d += width * kRegLanes)
    add_values<R, width>(rows, weights, block, count, d, dim, s);
  for (; d < dim; d += kRegLanes) add_values<R, 1>(rows, weights, block, count, d, dim, s);
}

// Update all `rows` with one block, at most sizeof...(I) rows at a time, and clear `rows`.
template <class Element, int... I>
inline void attend_rows(std::vector<QueryRow<Element>>& rows, const Heads& heads, Block<Element> block,
                        Scratch<Element>& s, std::integer_sequence<int, I...>) {
  typedef void Function(const QueryRow<Element>*, const Heads&, const Block<Element>&, Scratch<Element>&);
  static constexpr Function* functions[] = {attend_block<I + 1, Element>...};
  const int size = int(rows.size()), tiles = parts(size, sizeof...(I));
  for (int i = 0; i < tiles; i++) {
    const int first = part_begin(size, tiles, i);
    functions[part_begin(size, tiles, i + 1) - first - 1](&rows[first], heads, block, s);
    block.next_values = block.next_keys = nullptr;  // already prefetched
  }
  rows.clear();
}

// Return whether the matrix units attend to whole blocks.
template <class Element>
inline bool uses_matrix_units(int dim) {
  return std::is_same_v<Element, uint16_t> && dim % (2 * kLanes) == 0 && has_matrix_units();
}

// Update rows first .. end - 1 with a whole block on the matrix units, as `attend_block` does. The values follow the
// keys. `next` is the block to prefetch, or null.
inline void attend_whole_block(MatrixUnits& units, int first, int end, const Heads& heads, const uint16_t* keys,
                               const uint16_t* values, const uint16_t* next, Scratch<uint16_t>& s) {
  const int dim = heads.dim;
  const size_t row_bytes = sizeof(uint16_t) * dim;
  const int lines = next ? int(2 * kBlock * row_bytes / 64) : 0;  // cache lines of the next block
  int prefetched = 0;
  alignas(64) float scores[kMatrixBlock][kBlock];
  alignas(64) uint16_t weight[kMatrixBlock][kBlock];
  for (int r = first; r < end; r += kMatrixBlock) {
    const int rows = std::min(kMatrixBlock, end - r);
    units.configure(rows);
    for (int g = 0; g < kGroups; g += 2)
      multiply_block<false>(keys + g * dim * kLanes, keys + (g + 1) * dim * kLanes, 4 * kLanes,
                            &s.queries[size_t(r) * dim], row_bytes, rows, dim / 2, &scores[0][g * kLanes],
                            sizeof scores[0]);
    float max[kMatrixBlock] = {}, block_max[kMatrixBlock] = {};
    for (int i = 0; i < rows; i++) {
      max[i] = s.sums.max(r + i);
      block_max[i] = finish_scores(heads, 0, kBlock, scores[i]);
    }
    const auto maxima = update_max(max, block_max);
    for (int i = 0; i < rows; i++) {
      for (const int ahead = lines * (r - first + i + 1) / (end - first); prefetched < ahead; prefetched++)
        prefetch(reinterpret_cast<const char*>(next) + 64 * prefetched);
      s.sums.max(r + i) = maxima.max[i];
      const float rescale = maxima.rescale[i];
      write_weights(kBlock, scores[i], maxima.max[i], rescale, s.sums.mass(r + i),
                    [&](int j, FloatReg x) { return store_rounded(&weight[i][j], x); });
      float* sums = s.sums.values(r + i);
      for (int d = 0; rescale != 1.0f && d < dim; d += kLanes) store(sums + d, load(sums + d) * rescale);
    }
    for (int d = 0; d < dim; d += 2 * kLanes)
      multiply_block<true>(values + 2 * d, values + 2 * (d + kLanes), 2 * row_bytes, weight, sizeof weight[0], rows,
                           kBlock / 2, s.sums.values(r) + d, sizeof(float) * Sums::row_size(dim));
  }
}

// There are no matrix units for other elements.
template <class Element>
inline void attend_whole_block(MatrixUnits&, int, int, const Heads&, const Element*, const Element*, const Element*,
                               Scratch<Element>&) {}

// The first entry that a tile attends to, and the one after the last.
struct Reach {
  int begin, end;

  int sections() const { return parts(end, kSection) - begin / kSection; }
};

inline Reach reach_of(const Columns& columns, const Tile& tile, const Heads& heads) {
  Reach out{INT32_MAX, 0};
  for (int c = tile.first; c < tile.last; c++) {
    out.begin = std::min(out.begin, heads.window ? std::max(0, columns.position[c] + 1 - heads.window) : 0);
    out.end = std::max(out.end, columns.prefix[c] + columns.tail_begin[c + 1] - columns.tail_begin[c]);
  }
  return out;
}

// Write the sums of section number `section` of a tile, from its first one on, for the query heads that share key head `head`.
// There are none if the tile has fewer sections.
template <class Element>
inline void attend_section(const Columns& columns, const Tile& tile, int head, const Heads& heads, int section,
                        const Entries<Element>& entries, const Queries<Element>& queries, float* sums,
                        Scratch<Element>& s) {
  const int sharing = heads.query / heads.key;
  const int rows = (tile.last - tile.first) * sharing;
  s.sums = {sums, heads.dim};
  s.sums.clear(rows);
  const auto first_query = [&](int c) { return size_t(c) * heads.query + size_t(head) * sharing; };
  const bool uses_matrix = uses_matrix_units<Element>(heads.dim);
  constexpr const Element* no_block = nullptr;
  constexpr std::make_integer_sequence<int, kRowsAtOnce> any_number;
  MatrixUnits units;
  if (uses_matrix)
    for (int c = tile.first; c < tile.last; c++)
      std::memcpy(&s.queries[size_t(c - tile.first) * sharing * heads.dim],
                  queries.query + first_query(c) * heads.dim, sizeof(Factor<Element>) * sharing * heads.dim);
  const Reach reach = reach_of(columns, tile, heads);
  const int end = reach.end;
  const int first = (reach.begin / kSection + section) * kSection;
  for (int begin = first; begin < std::min(end, first + kSection); begin += kBlock) {
    int whole_begin = 0;  // rows for which this block of the cache is whole
    int whole_end = 0;
    const Element* next_keys = begin + kBlock < end ? entries.keys(begin + kBlock, head) : no_block;
    const auto attend_whole = [&] {
      if (whole_begin < whole_end)
        attend_whole_block(units, whole_begin, whole_end, heads, entries.keys(begin, head), entries.values(begin, head),
                           next_keys, s);
    };
    for (int c = tile.first; c < tile.last; c++) {
      const int tail = columns.tail_begin[c + 1] - columns.tail_begin[c];
      const int prefix = columns.prefix[c];
      const int count = std::min(kBlock, prefix + tail - begin);
      const int low = heads.window ? std::max(0, columns.position[c] + 1 - heads.window - begin) : 0;
      if (low >= count) continue;
      const int row = (c - tile.first) * sharing;
      if (uses_matrix && count == kBlock && !low) {
        if (prefix < begin + kBlock) {
          gather_entries(entries, head, columns, c, begin, count, s);
          attend_whole_block(units, row, row + sharing, heads, s.keys.data(), s.values.data(), no_block, s);
          continue;
        }
        if (row != whole_end) {
          attend_whole();
          whole_begin = row;
        }
        whole_end = row + sharing;
        continue;
      }
      auto& query_rows = prefix < begin + count ? s.gathered : s.in_place;
      for (int g = 0; g < sharing; g++) {
        const size_t number = first_query(c) + g;
        query_rows.push_back({queries.query + number * heads.dim, queries.scale[number], row + g, low, count});
      }
      if (s.gathered.empty()) continue;
      gather_entries(entries, head, columns, c, begin, count, s);
      attend_rows(s.gathered, heads, {s.keys.data(), s.values.data(), nullptr, nullptr}, s, any_number);
    }
    attend_whole();
    if (s.in_place.empty()) continue;
    const Element* keys = entries.keys(begin, head);
    const Element* values = entries.values(begin, head);
    attend_rows(s.in_place, heads, {keys, values, values, next_keys}, s, any_number);
  }
}

// Add the sums of the next section to `all`.
inline void add_section(const Sums& section, int rows, const Sums& all) {
  for (int r = 0; r < rows; r++) {
    if (sum(load(section.mass(r))) == 0) continue;  // without entries
    const float max[kLanes] = {all.max(r)}, section_max[kLanes] = {section.max(r)};
    const auto maxima = update_max(max, section_max);
    const float rescale = maxima.rescale[0], weight = maxima.weight[0];
    for (int i = 0; i < all.dim + kLanes; i += kRegLanes)
      store(all.values(r) + i, load_reg(all.values(r) + i) * rescale + load_reg(section.values(r) + i) * weight);
    all.max(r) = maxima.max[0];
  }
}

// Write the attention outputs of a tile for the query heads that share key head `head`. `out` is
// [columns][query heads * dim].
inline void write_outputs(const Sums& all, const Tile& tile, int head, const Heads& heads, float* out) {
  const int sharing = heads.query / heads.key;
  const int width = heads.query * heads.dim;
  for (int r = 0; r < (tile.last - tile.first) * sharing; r++) {
    float* to = out + size_t(tile.first + r / sharing) * width + size_t(head * sharing + r % sharing) * heads.dim;
    const float mass = sum(load(all.mass(r)));
    for (int d = 0; d < heads.dim; d += kLanes) store(to + d, load(all.values(r) + d) / mass);
  }
}

// Attend to all sections, and write the outputs.
template <class Element>
inline void attend(const Columns& columns, const Tile& tile, int head, const Heads& heads,
                   const Entries<Element>& entries, const Queries<Element>& queries, float* out, Scratch<Element>& s) {
  const int rows = (tile.last - tile.first) * (heads.query / heads.key);
  const Sums all{s.all.data(), heads.dim};
  all.clear(rows);
  for (int section = 0; section < reach_of(columns, tile, heads).sections(); section++) {
    attend_section(columns, tile, head, heads, section, entries, queries, s.section.data(), s);
    add_section(s.sums, rows, all);
  }
  write_outputs(all, tile, head, heads, out);
}

}  // namespace outrider
