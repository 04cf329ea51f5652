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
constexpr int kAhead = 2048;        // bytes to prefetch ahead
constexpr int kLine = 16;           // words of a cache line
// Words of inputs after which the other outputs of the panel are computed, while the panel is still in the cache.
constexpr int kRun = 64;

// Input rows in the format of a linear layer: float, bfloat16, or bytes with a scale and a sum for each group. If the
// processor cannot multiply pairs of bfloat16, bfloat16 inputs are stored as rounded floats. Tiles then need not split
// the pairs of a row.
struct Rows {
  int32_t* words;   // [rows][stride]
  float* scale;     // [rows][groups]
  int32_t* total;   // [rows][groups]
  int stride, groups;  // groups: capacity, for the smallest groups
};

// Return the stride of rows of `words` words. An odd number of cache lines keeps the rows of a tile in different sets of
// the cache. With a stride of 4096 bytes, all of them would share one set.
inline int spaced(int words) { return ((words + kLine - 1) / kLine | 1) * kLine; }

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

// Convert a group of inputs to bytes: row[begin ..] = round(x / scale), for values of `value_bits` bits. Set their scale and
// their sum.
inline void pack_group(const float* x, int32_t* row, int begin, int group, int value_bits, float& scale,
                       int32_t& total) {
  Floats sizes{};
  for (int i = 0; i < group; i += kRegLanes) {
    const FloatReg size = bits<FloatReg>(bits<IntReg>(load_reg(x + i)) & 0x7fffffff);
    float* lanes = reinterpret_cast<float*>(&sizes) + i % kLanes;
    const FloatReg most = load_reg(lanes);
    store(lanes, size > most ? size : most);  // leaves NaN out
  }
  const float max = largest(sizes);
  scale = max / 127;
  const float inverse = max > 0 ? 127 / max : 0;
  int32_t values[kGroup];
  for (int i = 0; i < group; i += kRegLanes) store(values + i, to_nearest(load_reg(x + i) * inverse));
  set_bytes(row, value_bits, begin, values, group);
  total = 0;
  for (int i = 0; i < group; i++) total += values[i];
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
  int32_t* row = rows.words + size_t(r) * rows.stride;
  const int value_bits = with_codes(layer, [](auto format) { return decltype(format)::value_bits; });
  for (int g = 0; g < padded(size) / layer.group; g++) {
    const int begin = g * layer.group;
    const int count = std::min(layer.group, size - begin);
    float tail[kGroup] = {};  // the last inputs, and zeros
    if (count > 0 && count < layer.group) std::memcpy(tail, x + begin, sizeof(float) * count);
    const size_t at = size_t(r) * rows.groups + g;
    pack_group(count == layer.group ? x + begin : tail, row, begin, layer.group, value_bits, rows.scale[at],
               rows.total[at]);
  }
}

// The functions that compute a panel for 1, 2, ... rows, from row r on. They are compiled in tiles_*.cpp.
struct Tiles {
  void (*function[kTile])(const Linear& layer, int panel, const Rows& x, int r, Floats (*out)[2]);
};
template <class Format>
const Tiles& tiles();

inline const Tiles& tiles(const Linear& layer) {
  return with_format(layer, [](auto format) -> const Tiles& { return tiles<decltype(format)>(); });
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
  const Tiles& functions = tiles(layer);
  Floats sums[kTile][2];
  for (int r = begin; r < end; r += kTile) {
    const int count = std::min(kTile, end - r);
    functions.function[count - 1](layer, panel, x, r, sums);
    for (int m = 0; m < count; m++)
      store_panel<mode>(layer, panel, sums[m][0], sums[m][1], out + size_t(r + m) * stride);
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
