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

inline int value_bits(const Linear& layer) {
  return with_codes(layer, [](auto format) { return decltype(format)::value_bits; });
}

// Convert a group of inputs to bytes: row[begin ..] = round(x / scale). Set their scale and their sum.
inline void pack_group(const float* x, int32_t* row, int begin, const Linear& layer, float& scale, int32_t& total) {
  Floats sizes{};
  for (int i = 0; i < layer.group; i += kRegLanes) {
    const FloatReg size = bits<FloatReg>(bits<IntReg>(load_reg(x + i)) & 0x7fffffff);
    float* lanes = reinterpret_cast<float*>(&sizes) + i % kLanes;
    const FloatReg most = load_reg(lanes);
    store(lanes, size > most ? size : most);  // leaves NaN out
  }
  const float max = largest(sizes);
  scale = max / 127;
  const float inverse = max > 0 ? 127 / max : 0;
  int32_t values[kGroup];
  for (int i = 0; i < layer.group; i += kRegLanes) store(values + i, to_nearest(load_reg(x + i) * inverse));
  set_bytes(row, value_bits(layer), begin, values, layer.group);
  total = 0;
  for (int i = 0; i < layer.group; i++) total += values[i];
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
  for (int g = 0; g < padded(size) / layer.group; g++) {
    const int begin = g * layer.group;
    const int count = std::min(layer.group, size - begin);
    float tail[kGroup] = {};  // the last inputs, and zeros
    if (count > 0 && count < layer.group) std::memcpy(tail, x + begin, sizeof(float) * count);
    const size_t at = size_t(r) * rows.groups + g;
    pack_group(count == layer.group ? x + begin : tail, row, begin, layer, rows.scale[at], rows.total[at]);
  }
}

// Copy the sums of a panel, computed `Regs` registers at a time, into vectors.
template <int Steps, int M, int Regs>
inline void copy_sums(const FloatReg (&sums)[Steps][M][Regs], Floats (&acc)[M][2]) {
  for (int i = 0; i < Steps; i++)
    for (int m = 0; m < M; m++)
      std::memcpy(reinterpret_cast<float*>(acc[m]) + i * Regs * kRegLanes, sums[i][m], sizeof sums[i][m]);
}

// Prefetch weights that are read later, for outputs in `Regs` registers. Each part of a panel prefetches its own weights,
// so that the memory is busy while every part is computed.
template <int Regs, class Stored>
inline void prefetch(const Stored* w) {
  for (size_t i = 0; i < Regs * kRegLanes * sizeof(Stored); i += 4 * kLine)
    __builtin_prefetch(reinterpret_cast<const char*>(w) + i + kAhead);
}

// The words of an input row that are multiplied with one word of each output: two if a pair of bfloat16 is multiplied as
// floats.
template <class Element>
constexpr int kParts = std::is_same_v<Element, uint16_t> ? sizeof(InputBfloat16) / 2 : 1;
// What is loaded for each output: a word, or one half float.
template <class Element>
using Stored = std::conditional_t<std::is_same_v<Element, Half>, uint16_t, int32_t>;

// Return part `part` of the weights of the outputs of one register.
template <class Element>
inline IntReg weights_at(const Stored<Element>* w, int part) {
  if constexpr (std::is_same_v<Element, Half>) return bits<IntReg>(half_to_float_reg(w));
  else return kParts<Element> == 1 ? load_reg(w) : half_of(load_reg(w), part);
}

// Add the products of `count` words of inputs to the sums of some outputs of a panel. Their weights begin at w.
template <class Element, int M, int Regs>
inline void add_words(FloatReg (&sums)[M][Regs], const Stored<Element>* w, const int32_t* x, int stride, int count) {
  FloatReg acc[M][Regs];  // a local copy, which compilers keep in registers
  std::memcpy(acc, sums, sizeof acc);
  for (int k = 0; k < count; k++, w += kPanel) {
    prefetch<Regs>(w);
    for (int part = 0; part < kParts<Element>; part++) {
      IntReg weights[Regs];
      for (int p = 0; p < Regs; p++) weights[p] = weights_at<Element>(w + p * kRegLanes, part);
      for (int m = 0; m < M; m++) {
        const IntReg word = IntReg{} + x[size_t(m) * stride + kParts<Element> * k + part];
        for (int p = 0; p < Regs; p++) acc[m][p] = dot_words<Input<Element>>(acc[m][p], weights[p], word);
      }
    }
  }
  std::memcpy(sums, acc, sizeof acc);
}

// Compute a panel for M rows, with weights that are floats, half floats or bfloat16.
template <class Element, int M>
inline void tile_words(const Linear& layer, int panel, const Rows& x, int r, Floats (&acc)[M][2]) {
  constexpr int regs = kPanel / kRegLanes;
  constexpr int regs_per_step = std::min(regs, M <= 2 ? 4 : 2);  // as many as fit into registers
  const int words = layer.inputs / (std::is_same_v<Element, uint16_t> ? 2 : 1);
  const int run = regs_per_step == regs ? words : kRun;
  const auto* w = static_cast<const Stored<Element>*>(layer.weight) + size_t(panel) * words * kPanel;
  const int32_t* inputs = x.words + size_t(r) * x.stride;
  FloatReg sums[regs / regs_per_step][M][regs_per_step] = {};
  for (int k = 0; k < words; k += run)
    for (int i = 0; i < regs / regs_per_step; i++)
      add_words<Element>(sums[i], w + size_t(k) * kPanel + i * regs_per_step * kRegLanes, inputs + kParts<Element> * k,
                         x.stride, std::min(run, words - k));
  copy_sums(sums, acc);
}

// Call f with the numbers 0 .. count - 1 as constants.
template <class F, int... I>
inline void for_each(F&& f, std::integer_sequence<int, I...>) { (f(std::integral_constant<int, I>()), ...); }
template <int count, class F>
inline void for_each(F&& f) { for_each(f, std::make_integer_sequence<int, count>()); }

// Return the numbers from index `at` on for the outputs of one register.
inline FloatReg numbers(const void* values, Number number, size_t at) {
  if (number == Number::kFloat) return load_reg(static_cast<const float*>(values) + at);
  const auto* half = static_cast<const uint16_t*>(values) + at;
  return number == Number::kHalf ? half_to_float_reg(half) : to_float_reg(half);
}

// The scales or minima of the outputs of one register in a group.
struct ScaleRegs { FloatReg scale, minimum; };

// Return the scales and minima of group `g` of a panel for the outputs of one register, which begin at `lane`.
template <class Format>
inline ScaleRegs scales_at(const Linear& panel, int g, int lane) {
  const size_t at = size_t(g) * kPanel + lane;
  const auto read = [&](const void* value) {
    const auto* half = static_cast<const uint16_t*>(value);
    if (Format::any_scales) return numbers(value, panel.number, at);
    if (Format::number == Number::kBfloat16) return to_float_reg(half + at);
    if (!panel.sub_scale) return half_to_float_reg(half + at);
    return half_to_float_reg(half + size_t(g * Format::group / kSuperBlock) * kPanel + lane);
  };
  ScaleRegs out = {read(panel.scale), {}};
  if (panel.minimum) out.minimum = read(panel.minimum);
  if (Format::any_scales || Format::number == Number::kBfloat16 || !panel.sub_scale) return out;
  if (Format::joint_scales) {
    const IntReg both = byte_to_int_reg(panel.sub_scale + at);
    out.scale *= __builtin_convertvector(both & 15, FloatReg);
    out.minimum *= __builtin_convertvector(both >> 4 & 15, FloatReg);
    return out;
  }
  out.scale *= __builtin_convertvector(byte_to_int_reg(panel.sub_scale + at), FloatReg);
  if (panel.sub_minimum) out.minimum *= __builtin_convertvector(byte_to_int_reg(panel.sub_minimum + at), FloatReg);
  return out;
}

// Add the products of some steps of a chunk to the sums of some outputs of a panel, for M rows. `w` is the first word of
// the chunk, `x` the first inputs of the steps.
template <class Format, int First, int Steps, int M, int Regs>
inline void add_codes(IntReg (&sums)[M][Regs], const int32_t* w, const int32_t* x, int stride) {
  constexpr int words = byte_words(Format::value_bits);
  constexpr bool narrow = sums_narrow(Format::value_bits);
  constexpr int run = narrow ? std::min(Steps, narrow_steps(Format::value_bits)) : Steps;
  constexpr int first_word = First * Format::bits / 8, end_word = (First + Steps) * Format::bits / 8;
  for (int i = first_word; i < end_word; i++) prefetch<Regs>(w + i * kPanel);
  for_each<Steps / run>([&](auto number) {
    IntReg acc[M][Regs] = {};
    for_each<run>([&](auto i) {
      constexpr int step = decltype(number)::value * run + decltype(i)::value;
      for (int word = 0; word < words; word++) {
        IntReg weights[Regs];
        for (int p = 0; p < Regs; p++)
          weights[p] = bytes_for<words>(values_at<Format>(w + p * kRegLanes, First + step), word);
        for (int m = 0; m < M; m++) {
          const IntReg input = IntReg{} + x[size_t(m) * stride + step * words + word];
          for (int p = 0; p < Regs; p++) {
            acc[m][p] = narrow ? dot_narrow(acc[m][p], weights[p], input) : dot_bytes(acc[m][p], weights[p], input);
            settle(acc[m][p]);
          }
        }
      }
    });
    for (int m = 0; m < M; m++)
      for (int p = 0; p < Regs; p++)
        sums[m][p] = narrow ? add_narrow(sums[m][p], acc[m][p]) : sums[m][p] + acc[m][p];
  });
}

// Add the products of group `g` of a panel to the sums of some outputs, which begin at `lane`, for M rows. `w` is the
// chunk of the group, which begins at step `First` of it.
template <class Format, int First, int M, int Regs>
inline void add_group(FloatReg (&sums)[M][Regs], const Linear& panel, int g, const int32_t* w, int lane, const Rows& x,
                      int r) {
  constexpr int chunks = std::max(1, Format::group / kChunk);
  constexpr int steps = std::min(kChunk, Format::group) / 4;
  constexpr int words = byte_words(Format::value_bits);
  const int32_t* inputs = x.words + size_t(r) * x.stride + g * Format::group / 4 * words;
  IntReg group_sum[M][Regs];
  for (int m = 0; m < M; m++)
    for (int p = 0; p < Regs; p++) group_sum[m][p] = IntReg{} - panel.offset * x.total[size_t(r + m) * x.groups + g];
  if constexpr (Format::any_scales)
    for (int p = 0; panel.zero && p < Regs; p++) {
      const IntReg zeros = byte_to_int_reg(panel.zero + size_t(g) * kPanel + lane + p * kRegLanes);
      for (int m = 0; m < M; m++) group_sum[m][p] -= zeros * x.total[size_t(r + m) * x.groups + g];
    }
  for (int c = 0; c < chunks; c++)
    add_codes<Format, First, steps>(group_sum, w + c * Format::bits * kPanel + lane, inputs + c * steps * words,
                                    x.stride);
  for (int p = 0; p < Regs; p++) {
    const ScaleRegs scales = scales_at<Format>(panel, g, lane + p * kRegLanes);
    for (int m = 0; m < M; m++)
      sums[m][p] += __builtin_convertvector(group_sum[m][p], FloatReg) *
                    (scales.scale * x.scale[size_t(r + m) * x.groups + g]);
    if (!panel.minimum) continue;
    for (int m = 0; m < M; m++) {
      const size_t at = size_t(r + m) * x.groups + g;
      sums[m][p] += scales.minimum * (x.scale[at] * float(x.total[at]));
    }
  }
}

// Compute a panel for M rows, with quantized weights.
template <class Format, int M>
inline void tile_codes(const Linear& layer, int number, const Rows& x, int r, Floats (&acc)[M][2]) {
  constexpr int regs = kPanel / kRegLanes;
  constexpr int regs_per_step = std::min(regs, M == 1 ? 4 : 2);  // as many as fit into registers
  constexpr int span = std::max(kChunk, Format::group);          // inputs of whole chunks and whole groups
  constexpr int groups = span / Format::group;
  const Linear panel = from_panel(layer, number);
  const auto* w = static_cast<const int32_t*>(panel.weight);
  FloatReg sums[regs / regs_per_step][M][regs_per_step] = {};
  for (int g = 0; g < layer.inputs / Format::group; g += groups, w += span / kChunk * Format::bits * kPanel)
    for (int i = 0; i < regs / regs_per_step; i++)
      for_each<groups>([&](auto part) {
        constexpr int first = decltype(part)::value * Format::group / 4;
        add_group<Format, first>(sums[i], panel, g + part, w, i * regs_per_step * kRegLanes, x, r);
      });
  copy_sums(sums, acc);
}

// Compute a panel for M rows, from row r on.
template <int M>
void compute_tile(const Linear& layer, int panel, const Rows& x, int r, Floats (*out)[2]) {
  Floats acc[M][2];
  if (layer.bits == 32)
    tile_words<float>(layer, panel, x, r, acc);
  else if (layer.values == Values::kHalf)
    tile_words<Half>(layer, panel, x, r, acc);
  else if (layer.bits == 16)
    tile_words<uint16_t>(layer, panel, x, r, acc);
  else
    with_codes(layer, [&](auto format) { tile_codes<decltype(format)>(layer, panel, x, r, acc); });
  std::memcpy(out, acc, sizeof acc);
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

// Return `compute_tile` for 1, 2, ... rows.
template <int... I>
constexpr auto tile_functions(std::integer_sequence<int, I...>) {
  using Function = void (*)(const Linear&, int, const Rows&, int, Floats (*)[2]);
  struct Table { Function function[sizeof...(I)]; };
  return Table{{compute_tile<I + 1>...}};
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
  static constexpr auto table = tile_functions(std::make_integer_sequence<int, kTile>());
  Floats sums[kTile][2];
  for (int r = begin; r < end; r += kTile) {
    const int count = std::min(kTile, end - r);
    table.function[count - 1](layer, panel, x, r, sums);
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
