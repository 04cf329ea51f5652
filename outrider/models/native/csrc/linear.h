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
#include "simd.h"
#include "threads.h"

namespace outrider {

constexpr int kPanel = 2 * kLanes;  // outputs of a panel
constexpr int kGroup = 64;          // inputs that share a scale; input lengths are padded to a multiple of it
constexpr int kSmallGroup = 16;     // the smallest group of a format of GGUF blocks
constexpr int kSuperBlock = 256;    // inputs that share the scale of their scales, in formats with two levels
constexpr int kTile = kRegLanes == kLanes ? 12 : 6;  // rows whose sums fit into registers, for two registers of outputs
constexpr int kAhead = 2048;        // bytes to prefetch ahead
constexpr int kLine = 16;           // words of a cache line
// Words of inputs after which the other outputs of the panel are computed, while the panel is still in the cache.
constexpr int kRun = 64;

// The type of scales and minima. Half floats are those of GGUF blocks and of many other quantized checkpoints.
enum Number : int32_t { kBfloat16, kHalf, kFloat };

// A quantized weight is (q - offset - zero) * scale + minimum. q has 8 or 4 bits; the others are those of its group. In
// formats with two levels, scale and minimum are a half float of 256 inputs times a small integer of the group.
struct Linear {
  const void* weight;         // [outputs / 32][inputs * bits / 32][32] of 32 bits
  const void* scale;          // [outputs / 32][inputs / group, or / 256 with two levels][32]; null for 32 and 16 bits
  const void* minimum;        // the same, or null
  const int8_t* sub_scale;    // [outputs / 32][inputs / group][32] with two levels, else null
  const int8_t* sub_minimum;  // the same, or null
  const int8_t* zero;         // [outputs / 32][inputs / group][32], or null: all are 0
  const int32_t* order;       // [inputs] the input of each column of the weight, or null: they are in order
  const float* bias;          // [outputs] or null
  int32_t inputs, outputs;
  int32_t bits;               // 32: float; 16: pairs of bfloat16; 8; 4
  int32_t group, offset;
  int32_t number;             // the `Number` of scale and minimum
};

// Input rows in the format of a linear layer: float, bfloat16, or bytes with a scale and a sum for each group. If the
// processor cannot multiply pairs of bfloat16, bfloat16 inputs are stored as rounded floats. Tiles then need not split
// the pairs of a row.
struct Rows {
  int32_t* words;   // [rows][stride]
  float* scale;     // [rows][groups]
  int32_t* total;   // [rows][groups]
  int stride, groups;  // groups: capacity, for the smallest groups
};

inline int padded(int size) { return (size + kGroup - 1) / kGroup * kGroup; }

// Return the stride of rows of `words` words. An odd number of cache lines keeps the rows of a tile in different sets of
// the cache. With a stride of 4096 bytes, all of them would share one set.
inline int spaced(int words) { return ((words + kLine - 1) / kLine | 1) * kLine; }

template <class Element>
inline void copy_row(const Rows& rows, int r, const float* x, int size) {
  auto* out = reinterpret_cast<Element*>(rows.words + size_t(r) * rows.stride);
  for (int i = 0; i < size; i++) set(out[i], x[i]);
  for (int i = size; i < padded(size); i++) set(out[i], 0.0f);
}

// Write `count` inputs of a row from number `begin` on, in the layout for weights of `bits` bits.
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
  set_bytes(row, layer.bits, begin, values, layer.group);
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
  if (layer.bits == 32) return copy_row<float>(rows, r, x, size);
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
template <int Regs>
inline void prefetch(const int32_t* w) {
  for (int i = 0; i < Regs * kRegLanes; i += kLine) __builtin_prefetch(reinterpret_cast<const char*>(w + i) + kAhead);
}

// Add the products of `count` words of inputs to the sums of some outputs of a panel. Their weights begin at w.
template <class Element, int M, int Regs>
inline void add_words(FloatReg (&sums)[M][Regs], const int32_t* w, const int32_t* x, int stride, int count) {
  constexpr int halves = sizeof(Input<Element>) / sizeof(Element);
  FloatReg acc[M][Regs];  // a local copy, which compilers keep in registers
  std::memcpy(acc, sums, sizeof acc);
  for (int k = 0; k < count; k++, w += kPanel) {
    prefetch<Regs>(w);
    for (int half = 0; half < halves; half++) {
      IntReg weights[Regs];
      for (int p = 0; p < Regs; p++) {
        const IntReg word = load_reg(w + p * kRegLanes);
        weights[p] = halves == 1 ? word : half_of(word, half);
      }
      for (int m = 0; m < M; m++) {
        const IntReg word = IntReg{} + x[size_t(m) * stride + halves * k + half];
        for (int p = 0; p < Regs; p++) acc[m][p] = dot_words<Input<Element>>(acc[m][p], weights[p], word);
      }
    }
  }
  std::memcpy(sums, acc, sizeof acc);
}

// Compute a panel for M rows, with float or bfloat16 weights.
template <class Element, int M>
inline void tile_words(const Linear& layer, int panel, const Rows& x, int r, Floats (&acc)[M][2]) {
  constexpr int regs = kPanel / kRegLanes;
  constexpr int halves = sizeof(Input<Element>) / sizeof(Element);
  constexpr int regs_per_step = std::min(regs, M <= 2 ? 4 : 2);  // as many as fit into registers
  const int words = layer.inputs * int(sizeof(Element)) / 4;
  const int run = regs_per_step == regs ? words : kRun;
  const int32_t* w = static_cast<const int32_t*>(layer.weight) + size_t(panel) * words * kPanel;
  const int32_t* inputs = x.words + size_t(r) * x.stride;
  FloatReg sums[regs / regs_per_step][M][regs_per_step] = {};
  for (int k = 0; k < words; k += run)
    for (int i = 0; i < regs / regs_per_step; i++)
      add_words<Element>(sums[i], w + size_t(k) * kPanel + i * regs_per_step * kRegLanes, inputs + halves * k, x.stride,
                         std::min(run, words - k));
  copy_sums(sums, acc);
}

// Return the numbers from index `at` on for the outputs of one register.
inline FloatReg numbers(const void* value, int32_t number, size_t at) {
  if (number == kFloat) return load_reg(static_cast<const float*>(value) + at);
  const uint16_t* half = static_cast<const uint16_t*>(value) + at;
  return number == kHalf ? half_to_float_reg(half) : to_float_reg(half);
}

// Return scales or minima of group `g` for the outputs of one register, which begin at `lane` in the panel. `g` counts
// the groups of the panels before as well.
template <int Group>
inline FloatReg group_values(const void* value, int32_t number, const int8_t* sub_value, size_t g, int lane) {
  if (!sub_value) return numbers(value, number, g * kPanel + lane);
  const FloatReg super = numbers(value, kHalf, g * Group / kSuperBlock * kPanel + lane);
  return super * byte_to_float_reg(sub_value + g * kPanel + lane);
}

// Add the products of a group to the sums of some outputs of a panel, for M rows with weights of 8 or 4 bits.
template <int M, int Regs, int Bits, int Steps>
inline void add_bytes(IntReg (&sums)[M][Regs], const int32_t* w, const int32_t* x, int stride) {
  constexpr int words = byte_words(Bits);
  constexpr bool narrow = kNarrowSums && Bits == 4;
  constexpr int run = narrow ? kNarrowSteps : Steps;  // steps after which 16-bit sums are added to those of 32 bits
  static_assert(Steps % run == 0);
  for (int begin = 0; begin < Steps; begin += run) {
    IntReg acc[M][Regs] = {};
    for (int k = begin; k < begin + run; k += 8 / Bits, w += kPanel) {
      prefetch<Regs>(w);
      for (int j = 0; j < 8 / Bits * words; j++) {
        IntReg weights[Regs];
        for (int p = 0; p < Regs; p++) {
          const IntReg word = load_reg(w + p * kRegLanes);
          const IntReg bytes = Bits == 8 ? word : (word >> (4 * (j / words))) & 0x0f0f0f0f;
          weights[p] = bytes_for<words>(bytes, j % words);
        }
        for (int m = 0; m < M; m++) {
          const IntReg input = IntReg{} + x[size_t(m) * stride + k * words + j];
          for (int p = 0; p < Regs; p++)
            acc[m][p] = narrow ? dot_narrow(acc[m][p], weights[p], input) : dot_bytes(acc[m][p], weights[p], input);
        }
      }
    }
    for (int m = 0; m < M; m++)
      for (int p = 0; p < Regs; p++)
        sums[m][p] = narrow ? add_narrow(sums[m][p], acc[m][p]) : sums[m][p] + acc[m][p];
  }
}

// Compute a panel for M rows, with weights of 8 or 4 bits.
template <int M, int Bits, int Group>
inline void tile_bytes(const Linear& layer, int panel, const Rows& x, int r, Floats (&acc)[M][2]) {
  constexpr int regs = kPanel / kRegLanes;
  constexpr int regs_per_step = std::min(regs, M == 1 ? 4 : 2);  // as many as fit into registers
  constexpr int steps = Group / 4;
  const int groups = layer.inputs / Group;
  const int group_words = steps * Bits / 8 * kPanel;  // words of weights in a group
  const int32_t* w = static_cast<const int32_t*>(layer.weight) + size_t(panel) * groups * group_words;
  const size_t first_group = size_t(panel) * groups;
  FloatReg sums[regs / regs_per_step][M][regs_per_step] = {};
  for (int g = 0; g < groups; g++, w += group_words)
    for (int i = 0; i < regs / regs_per_step; i++) {
      IntReg group_sum[M][regs_per_step];
      for (int m = 0; m < M; m++)
        for (int p = 0; p < regs_per_step; p++)
          group_sum[m][p] = IntReg{} - layer.offset * x.total[size_t(r + m) * x.groups + g];
      for (int p = 0; layer.zero && p < regs_per_step; p++) {
        const int8_t* zeros = layer.zero + (first_group + g) * kPanel + (i * regs_per_step + p) * kRegLanes;
        for (int m = 0; m < M; m++) group_sum[m][p] -= byte_to_int_reg(zeros) * x.total[size_t(r + m) * x.groups + g];
      }
      const int32_t* inputs = x.words + size_t(r) * x.stride + g * steps * byte_words(Bits);
      add_bytes<M, regs_per_step, Bits, steps>(group_sum, w + i * regs_per_step * kRegLanes, inputs, x.stride);
      for (int p = 0; p < regs_per_step; p++) {
        const int lane = (i * regs_per_step + p) * kRegLanes;
        const FloatReg scales = group_values<Group>(layer.scale, layer.number, layer.sub_scale, first_group + g, lane);
        for (int m = 0; m < M; m++)
          sums[i][m][p] +=
              __builtin_convertvector(group_sum[m][p], FloatReg) * (scales * x.scale[size_t(r + m) * x.groups + g]);
        if (!layer.minimum) continue;
        const FloatReg minima = group_values<Group>(layer.minimum, layer.number, layer.sub_minimum, first_group + g, lane);
        for (int m = 0; m < M; m++) {
          const size_t at = size_t(r + m) * x.groups + g;
          sums[i][m][p] += minima * (x.scale[at] * float(x.total[at]));
        }
      }
    }
  copy_sums(sums, acc);
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

template <Store mode, int M>
void compute_tile(const Linear& layer, int panel, const Rows& x, int r, float* out, int stride) {
  Floats acc[M][2] = {};
  if (layer.bits == 32)
    tile_words<float>(layer, panel, x, r, acc);
  else if (layer.bits == 16)
    tile_words<uint16_t>(layer, panel, x, r, acc);
  else if (layer.group == kGroup && layer.bits == 8)
    tile_bytes<M, 8, kGroup>(layer, panel, x, r, acc);
  else if (layer.group == kGroup)
    tile_bytes<M, 4, kGroup>(layer, panel, x, r, acc);
  else if (layer.bits == 4)
    tile_bytes<M, 4, 32>(layer, panel, x, r, acc);
  else if (layer.group == 32)
    tile_bytes<M, 8, 32>(layer, panel, x, r, acc);
  else
    tile_bytes<M, 8, 16>(layer, panel, x, r, acc);
  for (int m = 0; m < M; m++) store_panel<mode>(layer, panel, acc[m][0], acc[m][1], out + size_t(r + m) * stride);
}

// Return `compute_tile` for 1, 2, ... rows.
template <Store mode, int... I>
constexpr auto tile_functions(std::integer_sequence<int, I...>) {
  using Function = void (*)(const Linear&, int, const Rows&, int, float*, int);
  struct Table { Function function[sizeof...(I)]; };
  return Table{{compute_tile<mode, I + 1>...}};
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
  if (layer.bits == 16 && has_matrix_units())
    return compute_matrix<mode>(units, layer, panel, x, begin, end, out, stride);
  static constexpr auto table = tile_functions<mode>(std::make_integer_sequence<int, kTile>());
  for (int r = begin; r < end; r += kTile)
    table.function[std::min(kTile, end - r) - 1](layer, panel, x, r, out, stride);
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

// Return the scale or minimum of one output.
inline float group_value(const Linear& layer, const void* value, const int8_t* sub_value, size_t g, int lane) {
  const size_t at = (sub_value ? g * layer.group / kSuperBlock : g) * kPanel + lane;
  const float sub = sub_value ? sub_value[g * kPanel + lane] : 1.0f;
  if (layer.number == kFloat) return static_cast<const float*>(value)[at] * sub;
  const uint16_t half = static_cast<const uint16_t*>(value)[at];
  return (layer.number == kHalf ? half_to_float(half) : to_float(half)) * sub;
}

// Write the first `size` entries of a row of a weight as floats.
inline void read_row(const Linear& layer, int row, int size, float* out) {
  const int panel = row / kPanel;
  const int lane = row % kPanel;
  const size_t first_group = size_t(panel) * (layer.inputs / layer.group);
  const size_t first_word = size_t(panel) * (layer.inputs * layer.bits / 32) * kPanel;
  const auto* words = static_cast<const int32_t*>(layer.weight) + first_word;
  for (int i = 0; i < size; i++) {
    const size_t g = first_group + i / layer.group;
    const uint32_t word = uint32_t(words[size_t(i * layer.bits / 32) * kPanel + lane]);
    if (layer.bits > 8) {
      out[i] = layer.bits == 32 ? bits<float>(word) : to_float(uint16_t(word >> i % 2 * 16));
      continue;
    }
    const int shift = i % 4 * 8 + (layer.bits == 4 ? i / 4 % 2 * 4 : 0);
    const int q = int(word >> shift & (layer.bits == 8 ? 255u : 15u));
    const int zero = layer.offset + (layer.zero ? layer.zero[g * kPanel + lane] : 0);
    float& value = out[layer.order ? layer.order[i] : i];
    value = float(q - zero) * group_value(layer, layer.scale, layer.sub_scale, g, lane);
    if (layer.minimum) value += group_value(layer, layer.minimum, layer.sub_minimum, g, lane);
  }
}

}  // namespace outrider
