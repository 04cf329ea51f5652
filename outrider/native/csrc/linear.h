// y = W x for a few rows of x, reading W once.
//
// W lies in panels of 32 outputs, each panel in the order in which it is read. A decode step is bound by that reading;
// rows beyond the first cost arithmetic only. For one row of x the order of operations does not depend on the others.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "simd.h"
#include "threads.h"

namespace outrider {

constexpr int kPanel = 2 * kLanes;  // outputs
constexpr int kGroup = 64;          // inputs that share a scale; every length of input is a multiple of it
constexpr int kTile = kPart == kLanes ? 12 : 6;  // rows whose sums fit the registers, for two parts of a panel
constexpr int kAhead = 2048;        // bytes to prefetch ahead
constexpr int kRun = 64;            // words of inputs whose weights are read again, for other outputs, while they are near

struct Linear {
  const void* weight;      // [out / 32][in * bits / 32][32] of 32 bits
  const uint16_t* scale;   // [out / 32][in / 64][32] bfloat16; null for 32 and 16 bits
  const float* bias;       // [out] or null
  int32_t in, out, bits;   // 32: float; 16: bfloat16 pairs; 8 and 4: unsigned, shifted by 128 and 8
};

// Rows as a linear layer reads them: float, bfloat16, or bytes with a scale and a sum for every group. Where no
// instruction multiplies pairs of bfloat16, rounded floats stand for them, so that no tile takes a row's pairs apart.
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

// Put number i of a row where tiles look for it.
inline void set_byte(int32_t* row, int i, int32_t value) {
  if (kByteWords == 1)
    reinterpret_cast<int8_t*>(row)[i] = int8_t(value);
  else
    reinterpret_cast<int16_t*>(row)[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = int16_t(value);
}

// Write x [size] into row r. `bits` is the layer's that will read it.
inline void pack_row(const Rows& rows, int r, const float* x, int size, int bits) {
  int length = padded(size);
  if (bits == 32) return copy_row<float>(rows, r, x, size);
  if (bits == 16) return copy_row<Partner>(rows, r, x, size);
  int32_t* out = rows.words + size_t(r) * rows.stride;
  for (int g = 0; g < length / kGroup; g++) {
    int begin = g * kGroup, end = std::min(begin + kGroup, size);
    float most = 0;
    for (int i = begin; i < end; i++) most = std::max(most, std::fabs(x[i]));
    float scale = most / 127, inverse = most > 0 ? 127 / most : 0;
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

// A panel's sums from those of some of its parts at a time.
template <int Times, int M, int Parts>
inline void side_by_side(const FloatPart (&sums)[Times][M][Parts], Floats (&acc)[M][2]) {
  for (int i = 0; i < Times; i++)
    for (int m = 0; m < M; m++)
      std::memcpy(reinterpret_cast<float*>(acc[m]) + i * Parts * kPart, sums[i][m], sizeof sums[i][m]);
}

// Add to `sums` what some words of inputs give to some parts of a panel, whose weights begin at w.
template <class Element, int M, int Parts>
inline void add_words(FloatPart (&sums)[M][Parts], const int32_t* w, const int32_t* x, int stride, int count, bool fetch) {
  constexpr int halves = sizeof(Facing<Element>) / sizeof(Element);
  FloatPart own[M][Parts];  // which compilers keep in registers
  std::memcpy(own, sums, sizeof own);
  for (int k = 0; k < count; k++, w += kPanel) {
    if (fetch)
      for (int i = 0; i < kPanel; i += 16) __builtin_prefetch(reinterpret_cast<const char*>(w + i) + kAhead);
    for (int half = 0; half < halves; half++) {
      IntPart weights[Parts];
      for (int p = 0; p < Parts; p++) {
        const IntPart word = load_part(w + p * kPart);
        weights[p] = halves == 1 ? word : half_of(word, half);
      }
      for (int m = 0; m < M; m++) {
        const IntPart word = IntPart{} + x[size_t(m) * stride + halves * k + half];
        for (int p = 0; p < Parts; p++) own[m][p] = dot_words<Facing<Element>>(own[m][p], weights[p], word);
      }
    }
  }
  std::memcpy(sums, own, sizeof own);
}

template <class Element, int M>
inline void tile_words(const Linear& layer, int panel, const Rows& x, int r, Floats (&acc)[M][2]) {
  constexpr int parts = kPanel / kPart, halves = sizeof(Facing<Element>) / sizeof(Element);
  constexpr int wide = std::min(parts, M <= 2 ? 4 : 2);  // parts whose sums fit the registers
  const int steps = layer.in * int(sizeof(Element)) / 4, run = wide == parts ? steps : kRun;
  const int32_t* w = static_cast<const int32_t*>(layer.weight) + size_t(panel) * steps * kPanel;
  const int32_t* words = x.words + size_t(r) * x.stride;
  FloatPart sums[parts / wide][M][wide] = {};
  for (int k = 0; k < steps; k += run)
    for (int i = 0; i < parts / wide; i++)
      add_words<Element>(sums[i], w + size_t(k) * kPanel + i * wide * kPart, words + halves * k, x.stride,
                         std::min(run, steps - k), !i);
  side_by_side(sums, acc);
}

template <int M, int Bits>
inline void tile_bytes(const Linear& layer, int panel, const Rows& x, int r, Floats (&acc)[M][2]) {
  constexpr int parts = kPanel / kPart, wide = 2, kSteps = kGroup / 4, kOffset = 1 << (Bits - 1);
  const int groups = layer.in / kGroup, words = kSteps * Bits / 8 * kPanel;  // words of weights in a group
  const int32_t* w = static_cast<const int32_t*>(layer.weight) + size_t(panel) * groups * words;
  const uint16_t* scale = layer.scale + size_t(panel) * groups * kPanel;
  FloatPart sums[parts / wide][M][wide] = {};
  for (int g = 0; g < groups; g++, scale += kPanel, w += words)
    for (int i = 0; i < parts / wide; i++) {
      IntPart whole[M][wide];
      for (int m = 0; m < M; m++)
        for (int p = 0; p < wide; p++) whole[m][p] = IntPart{} - kOffset * x.total[size_t(r + m) * x.groups + g];
      const int32_t *from = w + i * wide * kPart, *row = x.words + size_t(r) * x.stride + g * kSteps * kByteWords;
      for (int k = 0; k < kSteps; k += 8 / Bits, from += kPanel) {
        for (int a = 0; !i && a < kPanel; a += 16) __builtin_prefetch(reinterpret_cast<const char*>(from + a) + kAhead);
        for (int j = 0; j < 8 / Bits * kByteWords; j++) {
          IntPart weights[wide];
          for (int p = 0; p < wide; p++) {
            const IntPart word = load_part(from + p * kPart);
            const IntPart four = Bits == 8 ? word : (word >> (4 * (j / kByteWords))) & 0x0f0f0f0f;
            weights[p] = bytes_for(four, j % kByteWords);
          }
          for (int m = 0; m < M; m++) {
            const IntPart bytes = IntPart{} + row[size_t(m) * x.stride + k * kByteWords + j];
            for (int p = 0; p < wide; p++) whole[m][p] = dot_bytes(whole[m][p], weights[p], bytes);
          }
        }
      }
      for (int p = 0; p < wide; p++) {
        const FloatPart each = widen_part(scale + (i * wide + p) * kPart);
        for (int m = 0; m < M; m++)
          sums[i][m][p] += __builtin_convertvector(whole[m][p], FloatPart) * (each * x.scale[size_t(r + m) * x.groups + g]);
      }
    }
  side_by_side(sums, acc);
}

// What becomes of a panel's sums.
enum class Then {
  kStore,  // out = y
  kAdd,    // out += y
  kGate,   // out = silu(first half) * second half: gate and up lie side by side in each panel
};

template <Then then>
inline void put(const Linear& layer, int panel, Floats first, Floats second, float* out) {
  int column = panel * kPanel;
  if (then == Then::kGate) {
    store(out + column / 2, first / (1.0f + exponential(-first)) * second);
    return;
  }
  float sums[kPanel];
  store(sums, first);
  store(sums + kLanes, second);
  int width = std::min(kPanel, layer.out - column);
  for (int i = 0; i < width; i++) {
    float value = sums[i] + (layer.bias ? layer.bias[column + i] : 0.0f);
    out[column + i] = then == Then::kAdd ? out[column + i] + value : value;
  }
}

template <Then then, int M>
void tile(const Linear& layer, int panel, const Rows& x, int r, float* out, int stride) {
  Floats acc[M][2] = {};
  if (layer.bits == 32)
    tile_words<float>(layer, panel, x, r, acc);
  else if (layer.bits == 16)
    tile_words<uint16_t>(layer, panel, x, r, acc);
  else if (layer.bits == 8)
    tile_bytes<M, 8>(layer, panel, x, r, acc);
  else
    tile_bytes<M, 4>(layer, panel, x, r, acc);
  for (int m = 0; m < M; m++) put<then>(layer, panel, acc[m][0], acc[m][1], out + size_t(r + m) * stride);
}

template <Then then, int... I>
constexpr auto tiles(std::integer_sequence<int, I...>) {
  using Tile = void (*)(const Linear&, int, const Rows&, int, float*, int);
  struct Table { Tile of[sizeof...(I)]; };
  return Table{{tile<then, I + 1>...}};
}

// out [rows][stride], by the whole team.
template <Then then>
void apply(const Team& team, const Linear& layer, const Rows& x, int rows, float* out, int stride) {
  static constexpr auto table = tiles<then>(std::make_integer_sequence<int, kTile>());
  team.share((layer.out + kPanel - 1) / kPanel, [&](int panel) {
    for (int r = 0; r < rows; r += kTile) table.of[std::min(kTile, rows - r) - 1](layer, panel, x, r, out, stride);
  });
}

}  // namespace outrider
