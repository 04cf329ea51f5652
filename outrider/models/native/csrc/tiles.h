// Products of one panel of weights with a few rows of inputs, for every format of weights.
//
// The functions for 1, 2, ... rows add up the products of a row in the same order, with the same instructions.
#pragma once

#include "linear.h"

namespace outrider {

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

// Whether a format is the type of weights that are not quantized.
template <class Format>
constexpr bool kIsElement = std::is_same_v<Format, float> || std::is_same_v<Format, Half> || std::is_same_v<Format, uint16_t>;

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

// Return the bits of the codes of a step, one byte each, for the outputs of one register. `w` is their first word in the
// chunk. The planes from one of `Bits` on are read, and moved to bit `To`.
template <int Bits, int To = 0>
inline IntReg codes_at(const int32_t* w, int step) {
  constexpr int width = widest_plane(Bits);
  constexpr int steps = 8 / width;  // of a word
  constexpr int32_t mask = int32_t(uint32_t((1 << width) - 1) * 0x01010101u << To);
  const int from = step % steps * width;
  IntReg codes = load_reg(w + step / steps * kPanel);
  codes = from > To ? codes >> (from - To) : codes << (To - from);
  if constexpr (width < 8) codes &= mask;
  if constexpr (Bits > width) codes |= codes_at<Bits - width, To + width>(w + width * kPanel, step);
  return codes;
}

// What is subtracted from the values of a format before they are multiplied.
template <class Format>
constexpr int kSubtracted = kSignedBytes && Format::value_bits == 8 ? 128 : 0;

// Return the values of a step less `kSubtracted`, one byte each.
template <class Format>
inline IntReg values_at(const int32_t* w, int step) {
  constexpr int32_t flipped = int32_t(kSubtracted<Format> * 0x01010101u);
  const IntReg codes = codes_at<Format::bits>(w, step);
  if constexpr (Format::table != Values::kPlain) return look_up(table_entries<Format::table>(), codes) ^ flipped;
  if constexpr (flipped) return codes ^ flipped;
  return codes;
}

// Return the numbers from index `at` on for the outputs of one register.
inline FloatReg numbers(const void* values, Number number, size_t at) {
  if (number == Number::kFloat) return load_reg(static_cast<const float*>(values) + at);
  if (number == Number::kExponent) return power_of(byte_to_int_reg(static_cast<const int8_t*>(values) + at) & 255);
  const auto* half = static_cast<const uint16_t*>(values) + at;
  return number == Number::kHalf ? half_to_float_reg(half) : to_float_reg(half);
}

// The scales or minima of the outputs of one register in a group.
struct ScaleRegs { FloatReg scale, minimum; };

// Return the scales and minima of group `g` of a panel for the outputs of one register, which begin at `lane`.
template <class Format>
inline ScaleRegs scales_at(const Linear& panel, int g, int lane) {
  const bool two_levels = Format::may_have_two_levels && panel.sub_scale;
  const size_t at = size_t(g) * kPanel + lane;
  const size_t number_at = two_levels ? size_t(g * Format::group / kSuperBlock) * kPanel + lane : at;
  const Number number = Format::any_scales ? panel.number : Format::number;
  ScaleRegs out = {numbers(panel.scale, number, number_at), {}};
  if (panel.minimum) out.minimum = numbers(panel.minimum, number, number_at);
  if (!two_levels) return out;
  const IntReg sub_scale = byte_to_int_reg(panel.sub_scale + at);
  if constexpr (Format::joint_scales) {
    out.scale *= __builtin_convertvector(sub_scale & 15, FloatReg);
    out.minimum *= __builtin_convertvector(sub_scale >> 4 & 15, FloatReg);
  } else {
    out.scale *= __builtin_convertvector(sub_scale, FloatReg);
    if (panel.sub_minimum) out.minimum *= __builtin_convertvector(byte_to_int_reg(panel.sub_minimum + at), FloatReg);
  }
  return out;
}

// Add the products of one step to the sums of some outputs of a panel, for M rows. `w` is the first word of the chunk,
// `step` the number of the step in it, and `x` its inputs.
template <class Format, bool narrow, int M, int Regs>
inline void add_step(IntReg (&acc)[M][Regs], const int32_t* w, int step, const int32_t* x, int stride) {
  constexpr int words = byte_words(Format::value_bits);
  for (int i = step * Format::bits / 8; i < (step + 1) * Format::bits / 8; i++) prefetch<Regs>(w + i * kPanel);
  for (int word = 0; word < words; word++) {
    IntReg weights[Regs];
    for (int p = 0; p < Regs; p++) weights[p] = bytes_for<words>(values_at<Format>(w + p * kRegLanes, step), word);
    for (int m = 0; m < M; m++) {
      const IntReg input = IntReg{} + x[size_t(m) * stride + word];
      for (int p = 0; p < Regs; p++) {
        acc[m][p] = narrow ? dot_narrow(acc[m][p], weights[p], input) : dot_bytes(acc[m][p], weights[p], input);
        settle(acc[m][p]);
      }
    }
  }
}

// Add the products of some steps of a chunk to the sums of some outputs of a panel, for M rows. `w` is the first word of
// the chunk, `x` the first inputs of the steps.
template <class Format, int First, int Steps, int M, int Regs>
inline void add_codes(IntReg (&sums)[M][Regs], const int32_t* w, const int32_t* x, int stride) {
  constexpr int words = byte_words(Format::value_bits);
  constexpr bool narrow = sums_narrow(Format::value_bits);
  constexpr int run = narrow ? std::min(Steps, narrow_steps(Format::value_bits)) : Steps;
  if constexpr (Format::bits == 8) {  // each step has its own word: a loop is as fast as its steps one by one
    for (int step = 0; step < Steps; step++) add_step<Format, false>(sums, w, First + step, x + step * words, stride);
    return;
  }
  for_each<Steps / run>([&](auto number) {
    IntReg acc[M][Regs] = {};
    for_each<run>([&](auto i) {
      constexpr int step = decltype(number)::value * run + decltype(i)::value;
      add_step<Format, narrow>(acc, w, First + step, x + step * words, stride);
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
  const size_t first = size_t(r) * x.groups + g;
  IntReg group_sum[M][Regs];
  for (int m = 0; m < M; m++)
    for (int p = 0; p < Regs; p++)
      group_sum[m][p] = IntReg{} - (panel.offset - kSubtracted<Format>) * x.total[first + size_t(m) * x.groups];
  if constexpr (Format::any_scales)
    for (int p = 0; panel.zero && p < Regs; p++) {
      const IntReg zeros = byte_to_int_reg(panel.zero + size_t(g) * kPanel + lane + p * kRegLanes);
      for (int m = 0; m < M; m++) group_sum[m][p] -= zeros * x.total[first + size_t(m) * x.groups];
    }
  for (int c = 0; c < chunks; c++)
    add_codes<Format, First, steps>(group_sum, w + c * Format::bits * kPanel + lane, inputs + c * steps * words,
                                    x.stride);
  for (int p = 0; p < Regs; p++) {
    const ScaleRegs scales = scales_at<Format>(panel, g, lane + p * kRegLanes);
    for (int m = 0; m < M; m++) {
      const size_t at = first + size_t(m) * x.groups;
      const FloatReg products = __builtin_convertvector(group_sum[m][p], FloatReg);
      sums[m][p] = multiply_add(sums[m][p], products, scales.scale * x.scale[at]);
      if (panel.minimum)
        sums[m][p] = multiply_add(sums[m][p], scales.minimum, FloatReg{} + x.scale[at] * float(x.total[at]));
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
template <class Format, int M>
void compute_tile(const Linear& layer, int panel, const Rows& x, int r, Floats (*out)[2]) {
  Floats acc[M][2];
  if constexpr (kIsElement<Format>)
    tile_words<Format>(layer, panel, x, r, acc);
  else
    tile_codes<Format>(layer, panel, x, r, acc);
  std::memcpy(out, acc, sizeof acc);
}

template <class Format, int... I>
constexpr Tiles make_tiles(std::integer_sequence<int, I...>) { return {{compute_tile<Format, I + 1>...}}; }

template <class Format>
const Tiles& tiles() {
  static constexpr Tiles all = make_tiles<Format>(std::make_integer_sequence<int, kTile>());
  return all;
}

}  // namespace outrider
