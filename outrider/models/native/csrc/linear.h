// Linear layers: y = W x for a few rows of x. W is read from memory once.
//
// W is stored in panels of 32 outputs, each panel in the order in which it is read. The memory bandwidth for W limits a
// decode step; each further row of x costs arithmetic only. The order of operations for one row of x does not depend
// on the other rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "matrix.h"
#include "threads.h"
#include "weights.h"

namespace outrider {

constexpr int kTile = kRegLanes == kLanes ? 12 : 6;  // rows whose sums fit into registers, for two registers of outputs
constexpr int kCodeTile = kRegLanes == kLanes ? 12 : 4;  // the same for codes, which need more registers
// Bytes to prefetch ahead, for weights that are not quantized and for codes. With AVX2, reading 2 kB takes less time than a
// cache miss.
constexpr int kAhead = kRegLanes == kLanes ? 2048 : 8192;
constexpr int kAheadCodes = kRegLanes == kLanes ? 2048 : 4096;
constexpr int kLine = 16;           // words of a cache line
// Words of inputs that are multiplied with all rows and outputs of a panel before the next ones, while their weights are in
// the cache.
constexpr int kRun = 64;

// A group of inputs that are bytes.
struct InputGroup {
  float scale;
  float scaled_total;  // the sum of the bytes times `scale`
  int32_t total;       // the sum of the bytes
  int32_t start;       // initial value of the sum of products with weights, see `Codes::center`
};

constexpr int kSpan = kSuperBlock;  // inputs whose products with all rows are computed before those of the next inputs

// The bytes of a row in a span, with `step_words` words for four inputs.
template <int step_words>
struct RowSpan {
  int32_t word[kSpan / 4 * step_words];
  InputGroup group[kSpan / kSmallGroup];
};

// Input rows in the format of a linear layer: float, bfloat16, or bytes in groups. If the processor cannot multiply pairs
// of bfloat16, bfloat16 inputs are stored as rounded floats. Tiles then need not split the pairs of a row.
//
// Bytes are stored by span, [inputs / kSpan][count] of RowSpan. The rows of a tile are neighbors, and compilers know the
// distance of their words.
struct Rows {
  int32_t* words;  // [count][stride]
  int stride;
  int count;       // rows of the pass
};

// Return the stride of rows of `words` words. An odd number of cache lines keeps the rows of a tile in different sets of
// the cache. With a stride of 4096 bytes, all of them would share one set.
inline int spaced(int words) { return ((words + kLine - 1) / kLine | 1) * kLine; }

// Return the words that a row of `inputs` inputs needs in any format. Floats need the most, except for short rows.
inline int row_words(int inputs) {
  return std::max(spaced(inputs), parts(inputs, kSpan) * int(sizeof(RowSpan<byte_words(8)>) / 4));
}

template <int step_words>
inline RowSpan<step_words>* row_span(const Rows& rows, int span, int r) {
  return reinterpret_cast<RowSpan<step_words>*>(rows.words) + size_t(span) * rows.count + r;
}

template <class Element>
inline void copy_row(const Rows& rows, int r, const float* x, int size) {
  auto* out = reinterpret_cast<Element*>(rows.words + size_t(r) * rows.stride);
  for (int i = 0; i < size; i++) set(out[i], x[i]);
  for (int i = size; i < padded(size); i++) set(out[i], 0.0f);
}

// Write `count` inputs of a row from number `begin` on, in the layout for values of `bits` bits.
inline void set_bytes(int32_t* row, int bits, int begin, const int32_t* values, int count) {
  if (byte_words(bits) == 1) {
    auto* out = reinterpret_cast<int8_t*>(row) + begin;
    for (int i = 0; i < count; i++) out[i] = int8_t(values[i]);
    return;
  }
  auto* out = reinterpret_cast<int16_t*>(row) + begin;
  for (int i = 0; i < count; i += 4) {
    out[i] = int16_t(values[i]);
    out[i + 1] = int16_t(values[i + 2]);
    out[i + 2] = int16_t(values[i + 1]);
    out[i + 3] = int16_t(values[i + 3]);
  }
}

// Convert inputs [Format::group] to bytes: row[begin ..] = round(x / scale).
template <class Format>
inline void pack_group(const float* x, int32_t* row, int begin, int center, InputGroup& out) {
  constexpr int group = Format::group;
  Floats sizes{};
  for (int i = 0; i < group; i += kRegLanes) {
    const FloatReg size = bits<FloatReg>(bits<IntReg>(load_reg(x + i)) & 0x7fffffff);
    float* lanes = reinterpret_cast<float*>(&sizes) + i % kLanes;
    const FloatReg most = load_reg(lanes);
    store(lanes, size > most ? size : most);  // leaves NaN out
  }
  const float max = largest(sizes);
  const float inverse = max > 0 ? 127 / max : 0;
  int32_t values[group], totals[kRegLanes], sums[4] = {};  // of the first, second, third and fourth inputs of all steps
  IntReg total{};
  for (int i = 0; i < group; i += kRegLanes) {
    const IntReg rounded = to_nearest(load_reg(x + i) * inverse);
    store(values + i, rounded);
    total += rounded;
  }
  set_bytes(row, Format::value_bits, begin, values, group);
  store(totals, total);
  for (int lane = 0; lane < kRegLanes; lane++) sums[lane % 4] += totals[lane];
  out.scale = max / 127;
  out.total = sums[0] + sums[1] + sums[2] + sums[3];
  out.scaled_total = out.scale * float(out.total);
  out.start = -center * out.total;
  if (Format::narrow)
    out.start = int32_t((-center * (sums[0] + sums[1]) & 0xffff) | uint32_t(-center * (sums[2] + sums[3])) << 16);
}

// Return x [size] in the order of the columns of a layer, in memory of this thread.
inline const float* ordered(const float* x, int size, const int32_t* order) {
  thread_local std::vector<float> out;
  out.resize(size);
  for (int i = 0; i < size; i++) out[i] = x[order[i]];
  return out.data();
}

// Convert x [size] into row r, for a linear layer.
inline void pack_row(const Rows& rows, int r, const float* x, int size, const Linear& layer) {
  if (layer.order) x = ordered(x, size, layer.order);
  if (layer.bits == 32 || layer.values == Values::kHalf) return copy_row<float>(rows, r, x, size);
  if (layer.bits == 16) return copy_row<InputBfloat16>(rows, r, x, size);
  with_codes(layer, [&](auto format) {
    using Format = decltype(format);
    constexpr int group = Format::group;
    for (int begin = 0; begin < padded(size); begin += group) {
      auto& span = *row_span<byte_words(Format::value_bits)>(rows, begin / kSpan, r);
      const int count = std::min(group, size - begin);
      float tail[group] = {};  // the last inputs, and zeros
      if (count > 0 && count < group) std::memcpy(tail, x + begin, sizeof(float) * count);
      pack_group<Format>(count == group ? x + begin : tail, span.word, begin % kSpan, Format::center(layer.offset),
                         span.group[begin % kSpan / group]);
    }
  });
}

constexpr int kRowBlock = 128;  // rows that are multiplied with the same unpacked weights

// Computes a panel for `rows` rows from row r on, at most kRowBlock. Each format has its own, compiled in tiles_*.cpp.
typedef void Tiles(const Linear& layer, int panel, const Rows& x, int r, int rows, float (*out)[kPanel]);
template <class Format>
Tiles tiles;

inline Tiles& tiles(const Linear& layer) {
  return with_format(layer, [](auto format) -> Tiles& { return tiles<decltype(format)>; });
}

// How the outputs of a layer are stored.
enum class Store {
  kSet,       // out = y
  kAdd,       // out += y
  kGate,      // out = silu(first half) * second half; each panel holds 16 gate outputs and the same 16 up outputs
  kGeluGate,  // the same with GELU, approximated by tanh
};

// GELU (Hendrycks and Gimpel 2016) in the approximation by tanh. (1 + tanh(y)) / 2 is the logistic function of 2 y.
inline Floats gelu(Floats x) {
  const Floats y = 1.5957691216f * (x + 0.044715f * x * x * x);  // 2 sqrt(2 / pi)
  return x / (1.0f + exponential(-y));
}

template <Store mode>
inline void store_panel(const Linear& layer, int panel, Floats first, Floats second, float* out) {
  int column = panel * kPanel;
  if (mode == Store::kGate || mode == Store::kGeluGate) {
    store(out + column / 2, (mode == Store::kGate ? first / (1.0f + exponential(-first)) : gelu(first)) * second);
    return;
  }
  float sums[kPanel];
  store(sums, first);
  store(sums + kLanes, second);
  int width = std::min(kPanel, layer.outputs - column);
  for (int i = 0; i < width; i++) {
    float value = sums[i] + (layer.bias ? layer.bias[column + i] : 0.0f);
    out[column + i] = mode == Store::kAdd ? out[column + i] + value : value;
  }
}

// Compute a panel for rows begin .. end - 1 on the matrix units.
template <Store mode>
void compute_matrix(MatrixUnits& units, const Linear& layer, int panel, const Rows& x, int begin, int end, float* out,
                    int stride) {
  const int words = layer.inputs / 2;
  const auto* weight = static_cast<const int32_t*>(layer.weight) + size_t(panel) * words * kPanel;
  float sums[kMatrixBlock][kPanel];
  for (int r = begin; r < end; r += kMatrixBlock) {
    const int count = std::min(kMatrixBlock, end - r);
    units.configure(count);
    multiply_panel(weight, x.words + size_t(r) * x.stride, count, x.stride, words, sums);
    for (int m = 0; m < count; m++)
      store_panel<mode>(layer, panel, load(sums[m]), load(sums[m] + kLanes), out + size_t(r + m) * stride);
  }
}

// Compute a panel for rows begin .. end - 1.
template <Store mode>
void compute_panel(MatrixUnits& units, const Linear& layer, int panel, const Rows& x, int begin, int end, float* out,
                   int stride) {
  if (layer.bits == 16 && layer.values == Values::kPlain && has_matrix_units())
    return compute_matrix<mode>(units, layer, panel, x, begin, end, out, stride);
  Tiles& compute = tiles(layer);
  const int rows = end - begin, blocks = parts(rows, kRowBlock);
  alignas(64) float sums[kRowBlock][kPanel];
  for (int i = 0; i < blocks; i++) {
    const int first = begin + part_begin(rows, blocks, i), last = begin + part_begin(rows, blocks, i + 1);
    compute(layer, panel, x, first, last - first, sums);
    for (int r = first; r < last; r++) {
      const float* sum = sums[r - first];
      store_panel<mode>(layer, panel, load(sum), load(sum + kLanes), out + size_t(r) * stride);
    }
  }
}

// Return how many panels take about 50 microseconds: in smaller steps, threads that all run lose time.
inline int panels_per_step(const Linear& layer, int rows) {
  return std::max(1, (1 << 15) / (layer.inputs * std::max(1, rows)));
}

// Write out [rows][stride]. Every thread of the team calls this.
template <Store mode>
void apply(Team& team, const Linear& layer, const Rows& x, int rows, float* out, int stride) {
  MatrixUnits units;
  const auto work = [&](int panel) { compute_panel<mode>(units, layer, panel, x, 0, rows, out, stride); };
  team.share((layer.outputs + kPanel - 1) / kPanel, work, panels_per_step(layer, rows));
}

}  // namespace outrider
