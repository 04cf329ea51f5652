// Linear layers: y = W x for a few rows of x. W is read from memory once.
//
// W is stored in panels of 32 outputs, each panel in the order in which it is read. The memory bandwidth for W limits a
// decode step; each further row of x costs arithmetic only. The order of operations for one row of x does not depend
// on the other rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "simd.h"
#include "threads.h"

namespace outrider {

constexpr int kPanel = 2 * kLanes;  // outputs of a panel
constexpr int kGroup = 64;          // inputs that share a scale; input lengths are padded to a multiple of it
constexpr int kTile = kRegLanes == kLanes ? 12 : 6;  // rows whose sums fit into registers, for two registers of outputs
constexpr int kAhead = 2048;        // bytes to prefetch ahead
// Words of inputs after which the other outputs of the panel are computed, while the panel is still in the cache.
constexpr int kRun = 64;

struct Linear {
  const void* weight;      // [out / 32][in * bits / 32][32] of 32 bits
  const uint16_t* scale;   // [out / 32][in / 64][32] bfloat16; null for 32 and 16 bits
  const float* bias;       // [out] or null
  int32_t in, out, bits;   // 32: float; 16: pairs of bfloat16; 8 and 4: unsigned with offset 128 and 8
};

// Input rows in the format of a linear layer: float, bfloat16, or bytes with a scale and a sum for each group. If the
// processor cannot multiply pairs of bfloat16, bfloat16 inputs are stored as rounded floats. Tiles then need not split
// the pairs of a row.
struct Rows {
  int32_t* words;   // [rows][stride]
  float* scale;     // [rows][groups]
  int32_t* total;   // [rows][groups]
  int stride, groups;
};

inline int padded(int size) { return (size + kGroup - 1) / kGroup * kGroup; }

template <class Element>
inline void copy_row(const Rows& rows, int r, const float* x, int size) {
  auto* out = reinterpret_cast<Element*>(rows.words + size_t(r) * rows.stride);
  for (int i = 0; i < size; i++) set(out[i], x[i]);
  for (int i = size; i < padded(size); i++) set(out[i], 0.0f);
}

// Write input number i of a row, in the layout that `dot_bytes` needs.
inline void set_byte(int32_t* row, int i, int32_t value) {
  if (kByteWords == 1)
    reinterpret_cast<int8_t*>(row)[i] = int8_t(value);
  else
    reinterpret_cast<int16_t*>(row)[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = int16_t(value);
}

// Convert x [size] into row r, for a layer with weights of `bits` bits.
inline void pack_row(const Rows& rows, int r, const float* x, int size, int bits) {
  int length = padded(size);
  if (bits == 32) return copy_row<float>(rows, r, x, size);
  if (bits == 16) return copy_row<InputBfloat16>(rows, r, x, size);
  int32_t* out = rows.words + size_t(r) * rows.stride;
  for (int g = 0; g < length / kGroup; g++) {
    int begin = g * kGroup;
    int end = std::min(begin + kGroup, size);
    float max = 0;
    for (int i = begin; i < end; i++) max = std::max(max, std::fabs(x[i]));
    float scale = max / 127;
    float inverse = max > 0 ? 127 / max : 0;
    int32_t total = 0;
    for (int i = begin; i < begin + kGroup; i++) {
      int32_t value = i < end ? int32_t(std::nearbyint(x[i] * inverse)) : 0;
      set_byte(out, i, value);
      total += value;
    }
    rows.scale[size_t(r) * rows.groups + g] = scale;
    rows.total[size_t(r) * rows.groups + g] = total;
  }
}

// Copy the sums of a panel, computed `Regs` registers at a time, into vectors.
template <int Steps, int M, int Regs>
inline void copy_sums(const FloatReg (&sums)[Steps][M][Regs], Floats (&acc)[M][2]) {
  for (int i = 0; i < Steps; i++)
    for (int m = 0; m < M; m++)
      std::memcpy(reinterpret_cast<float*>(acc[m]) + i * Regs * kRegLanes, sums[i][m], sizeof sums[i][m]);
}

// Add the products of `count` words of inputs to the sums of some outputs of a panel. Their weights begin at w.
template <class Element, int M, int Regs>
inline void add_words(FloatReg (&sums)[M][Regs], const int32_t* w, const int32_t* x, int stride, int count,
                      bool prefetch) {
  constexpr int halves = sizeof(Input<Element>) / sizeof(Element);
  FloatReg acc[M][Regs];  // a local copy, which compilers keep in registers
  std::memcpy(acc, sums, sizeof acc);
  for (int k = 0; k < count; k++, w += kPanel) {
    if (prefetch)
      for (int i = 0; i < kPanel; i += 16) __builtin_prefetch(reinterpret_cast<const char*>(w + i) + kAhead);
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
  const int words = layer.in * int(sizeof(Element)) / 4;
  const int run = regs_per_step == regs ? words : kRun;
  const int32_t* w = static_cast<const int32_t*>(layer.weight) + size_t(panel) * words * kPanel;
  const int32_t* inputs = x.words + size_t(r) * x.stride;
  FloatReg sums[regs / regs_per_step][M][regs_per_step] = {};
  for (int k = 0; k < words; k += run)
    for (int i = 0; i < regs / regs_per_step; i++)
      add_words<Element>(sums[i], w + size_t(k) * kPanel + i * regs_per_step * kRegLanes, inputs + halves * k, x.stride,
                         std::min(run, words - k), !i);
  copy_sums(sums, acc);
}

// Compute a panel for M rows, with weights of 8 or 4 bits.
template <int M, int Bits>
inline void tile_bytes(const Linear& layer, int panel, const Rows& x, int r, Floats (&acc)[M][2]) {
  constexpr int regs = kPanel / kRegLanes;
  constexpr int regs_per_step = 2;
  constexpr int kSteps = kGroup / 4;
  constexpr int kOffset = 1 << (Bits - 1);
  const int groups = layer.in / kGroup;
  const int group_words = kSteps * Bits / 8 * kPanel;  // words of weights in a group
  const int32_t* w = static_cast<const int32_t*>(layer.weight) + size_t(panel) * groups * group_words;
  const uint16_t* scale = layer.scale + size_t(panel) * groups * kPanel;
  FloatReg sums[regs / regs_per_step][M][regs_per_step] = {};
  for (int g = 0; g < groups; g++, scale += kPanel, w += group_words)
    for (int i = 0; i < regs / regs_per_step; i++) {
      IntReg group_sum[M][regs_per_step];
      for (int m = 0; m < M; m++)
        for (int p = 0; p < regs_per_step; p++)
          group_sum[m][p] = IntReg{} - kOffset * x.total[size_t(r + m) * x.groups + g];
      const int32_t* from = w + i * regs_per_step * kRegLanes;
      const int32_t* inputs = x.words + size_t(r) * x.stride + g * kSteps * kByteWords;
      for (int k = 0; k < kSteps; k += 8 / Bits, from += kPanel) {
        for (int a = 0; !i && a < kPanel; a += 16) __builtin_prefetch(reinterpret_cast<const char*>(from + a) + kAhead);
        for (int j = 0; j < 8 / Bits * kByteWords; j++) {
          IntReg weights[regs_per_step];
          for (int p = 0; p < regs_per_step; p++) {
            const IntReg word = load_reg(from + p * kRegLanes);
            const IntReg bytes = Bits == 8 ? word : (word >> (4 * (j / kByteWords))) & 0x0f0f0f0f;
            weights[p] = bytes_for(bytes, j % kByteWords);
          }
          for (int m = 0; m < M; m++) {
            const IntReg input = IntReg{} + inputs[size_t(m) * x.stride + k * kByteWords + j];
            for (int p = 0; p < regs_per_step; p++) group_sum[m][p] = dot_bytes(group_sum[m][p], weights[p], input);
          }
        }
      }
      for (int p = 0; p < regs_per_step; p++) {
        const FloatReg scales = to_float_reg(scale + (i * regs_per_step + p) * kRegLanes);
        for (int m = 0; m < M; m++)
          sums[i][m][p] +=
              __builtin_convertvector(group_sum[m][p], FloatReg) * (scales * x.scale[size_t(r + m) * x.groups + g]);
      }
    }
  copy_sums(sums, acc);
}

// How the outputs of a layer are stored.
enum class Store {
  kSet,  // out = y
  kAdd,    // out += y
  kGate,   // out = silu(first half) * second half; each panel holds 16 gate outputs and the same 16 up outputs
};

template <Store mode>
inline void store_panel(const Linear& layer, int panel, Floats first, Floats second, float* out) {
  int column = panel * kPanel;
  if (mode == Store::kGate) {
    store(out + column / 2, first / (1.0f + exponential(-first)) * second);
    return;
  }
  float sums[kPanel];
  store(sums, first);
  store(sums + kLanes, second);
  int width = std::min(kPanel, layer.out - column);
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
  else if (layer.bits == 8)
    tile_bytes<M, 8>(layer, panel, x, r, acc);
  else
    tile_bytes<M, 4>(layer, panel, x, r, acc);
  for (int m = 0; m < M; m++) store_panel<mode>(layer, panel, acc[m][0], acc[m][1], out + size_t(r + m) * stride);
}

// Return `compute_tile` for 1, 2, ... rows.
template <Store mode, int... I>
constexpr auto tile_functions(std::integer_sequence<int, I...>) {
  using Function = void (*)(const Linear&, int, const Rows&, int, float*, int);
  struct Table { Function function[sizeof...(I)]; };
  return Table{{compute_tile<mode, I + 1>...}};
}

// Write out [rows][stride]. Every thread of the team calls this.
template <Store mode>
void apply(const Team& team, const Linear& layer, const Rows& x, int rows, float* out, int stride) {
  static constexpr auto table = tile_functions<mode>(std::make_integer_sequence<int, kTile>());
  team.share((layer.out + kPanel - 1) / kPanel, [&](int panel) {
    for (int r = 0; r < rows; r += kTile)
      table.function[std::min(kTile, rows - r) - 1](layer, panel, x, r, out, stride);
  });
}

}  // namespace outrider
