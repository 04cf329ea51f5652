// Products of one panel of weights with a few rows of inputs, for every format of weights.
//
// Sums of a row add up its products in the same order, with the same instructions, for any number of rows.
#pragma once

#include "linear.h"

namespace outrider {

// Copy the sums of a panel, computed `Regs` registers at a time, to rows.
template <int Steps, int M, int Regs>
inline void copy_sums(const FloatReg (&sums)[Steps][M][Regs], float (*out)[kPanel]) {
  for (int i = 0; i < Steps; i++)
    for (int m = 0; m < M; m++) std::memcpy(out[m] + i * Regs * kRegLanes, sums[i][m], sizeof sums[i][m]);
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
void tile_words(const Linear& layer, int panel, const Rows& x, int r, float (*out)[kPanel]) {
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
  copy_sums(sums, out);
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

// Return the values of a step less `Format::subtracted`, one byte each.
template <class Format>
inline IntReg values_at(const int32_t* w, int step) {
  constexpr int32_t flipped = int32_t(Format::subtracted * 0x01010101u);
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

// Add the products of group `g` to the sums of some outputs of a panel, which begin at `lane`, for one row. `w` is the
// chunk of the group, which begins at step `First` of it. The weights are unpacked in registers.
template <class Format, int First, int Regs>
inline void add_group(FloatReg (&sums)[Regs], const Linear& panel, int g, const int32_t* w, int lane, const int32_t* x,
                      const InputGroup& input) {
  constexpr int chunks = std::max(1, Format::group / kChunk);
  constexpr int steps = std::min(kChunk, Format::group) / 4;
  constexpr int words = byte_words(Format::value_bits);
  IntReg acc[Regs];
  for (int p = 0; p < Regs; p++) acc[p] = IntReg{} + input.start;
  for (int c = 0; c < chunks; c++, w += Format::bits * kPanel, x += steps * words)
    for_each<steps>([&](auto i) {
      constexpr int step = First + decltype(i)::value;
      for (int k = step * Format::bits / 8; k < (step + 1) * Format::bits / 8; k++) prefetch<Regs>(w + lane + k * kPanel);
      for_each<words>([&](auto word) {
        const IntReg inputs = IntReg{} + x[i * words + word];
        for_each<Regs>([&](auto p) {
          const IntReg weights = bytes_for<words>(values_at<Format>(w + lane + p * kRegLanes, step), word);
          IntReg sum = Format::narrow ? dot_narrow(acc[p], weights, inputs) : dot_bytes(acc[p], weights, inputs);
          settle(sum);
          acc[p] = sum;
        });
      });
    });
  const int correction = (Format::center(panel.offset) - panel.offset) * input.total;
  for_each<Regs>([&](auto p) {
    const int at = lane + p * kRegLanes;
    IntReg total = Format::narrow ? add_narrow(IntReg{}, acc[p]) + correction : acc[p];
    if constexpr (Format::any_scales)
      if (panel.zero) total -= byte_to_int_reg(panel.zero + size_t(g) * kPanel + at) * input.total;
    const ScaleRegs scales = scales_at<Format>(panel, g, at);
    sums[p] = multiply_add(sums[p], __builtin_convertvector(total, FloatReg), scales.scale * input.scale);
    if (panel.minimum) sums[p] = multiply_add(sums[p], scales.minimum, input.scaled_total - FloatReg{});
  });
}

// Compute a panel for one row.
template <class Format>
inline void tile_row(const Linear& panel, const int32_t* x, const InputGroup* group, float (*out)[kPanel]) {
  constexpr int regs = kPanel / kRegLanes, regs_per_step = std::min(regs, 4);  // as many as fit into registers
  constexpr int span = std::max(kChunk, Format::group);                        // inputs of whole chunks and whole groups
  constexpr int groups = span / Format::group, words = Format::group / 4 * byte_words(Format::value_bits);
  const auto* w = static_cast<const int32_t*>(panel.weight);
  FloatReg sums[regs / regs_per_step][1][regs_per_step] = {};
  for (int g = 0; g < panel.inputs / Format::group; g += groups, w += span / kChunk * Format::bits * kPanel)
    for (int i = 0; i < regs / regs_per_step; i++)
      for_each<groups>([&](auto part) {
        constexpr int first = decltype(part)::value * Format::group / 4;
        add_group<Format, first>(sums[i][0], panel, g + part, w, i * regs_per_step * kRegLanes, x + (g + part) * words,
                                 group[g + part]);
      });
  copy_sums(sums, out);
}

// The weights of some inputs of a panel, unpacked to what is multiplied with the words of input rows.
constexpr int kSpan = 256;  // inputs
struct alignas(64) Unpacked {
  int32_t word[kSpan / 2][kPanel];
  float scale[kSpan / kSmallGroup][kPanel], minimum[kSpan / kSmallGroup][kPanel];  // of each group
  int32_t zero[kSpan / kChunk][kPanel];  // of each group, if the format has zero points
};

// Unpack the weights of the groups from number `first` on. `w` is the first word of their chunk.
template <class Format>
inline void unpack(const Linear& panel, const int32_t* w, int first, int groups, Unpacked& out) {
  constexpr int words = byte_words(Format::value_bits);
  for (int c = 0; c < groups * Format::group / kChunk; c++)
    for (int lane = 0; lane < kPanel; lane += kRegLanes)
      for_each<kChunkSteps>([&](auto step) {
        const IntReg values = values_at<Format>(w + c * Format::bits * kPanel + lane, step);
        for (int i = 0; i < words; i++)
          store(out.word[(c * kChunkSteps + step) * words + i] + lane, bytes_for<words>(values, i));
      });
  for (int g = 0; g < groups; g++)
    for (int lane = 0; lane < kPanel; lane += kRegLanes) {
      const ScaleRegs scales = scales_at<Format>(panel, first + g, lane);
      store(out.scale[g] + lane, scales.scale);
      if (panel.minimum) store(out.minimum[g] + lane, scales.minimum);
      if constexpr (Format::any_scales)
        if (panel.zero) store(out.zero[g] + lane, byte_to_int_reg(panel.zero + size_t(first + g) * kPanel + lane));
    }
}

// What all rows of a tile have in common.
struct Span {
  const Unpacked* weights;
  int groups;
  int correction;                  // that is multiplied with the sum of the inputs of a group, and added
  bool minimum, zero;              // whether the weights have them
  const int32_t* ahead = nullptr;  // weights that are needed next
  int lines = 0;                   // cache lines of them to prefetch for each group in each pass
};

constexpr int kUnrolled = 4;                                // words that are multiplied without a loop
constexpr int kPassRegs = std::min(2, kPanel / kRegLanes);  // registers of sums for each row
constexpr int kPasses = kPanel / (kPassRegs * kRegLanes);  // over the inputs of a span

// Add the products of a span to the sums of M rows. `x` and `group` are the inputs of the first row in this span. Lambdas
// must be inlined, or the sums lie in memory.
template <int Group, bool narrow, int M>
__attribute__((flatten)) void multiply(const Span& span, const Rows& rows, const int32_t* x, const InputGroup* group,
                                       float (*sums)[kPanel]) {
  constexpr int regs = kPassRegs;
  constexpr int words = Group / 4 * (narrow ? 1 : byte_words(8));
  const Unpacked& w = *span.weights;
  const int32_t* ahead = span.ahead;
  for (int lane = 0; lane < kPanel; lane += regs * kRegLanes) {
    for (int g = 0; g < span.groups; g++) {
      for (int i = 0; i < span.lines; i++, ahead += kLine) __builtin_prefetch(ahead);
      const auto input = [&](int m) -> const InputGroup& { return group[size_t(m) * rows.groups + g]; };
      IntReg acc[M][regs];
      for_each<M>([&](auto m) {
        for_each<regs>([&](auto p) { acc[m][p] = IntReg{} + input(m).start; });
      });
      for (int first = g * words; first < (g + 1) * words; first += kUnrolled)
        for_each<kUnrolled>([&](auto i) {
          const int k = first + i;
          IntReg weights[regs];
          for_each<regs>([&](auto p) { weights[p] = load_reg(w.word[k] + lane + p * kRegLanes); });
          for_each<M>([&](auto m) {
            const IntReg word = IntReg{} + x[size_t(m) * rows.stride + k];
            for_each<regs>([&](auto p) {
              IntReg sum = narrow ? dot_narrow(acc[m][p], weights[p], word) : dot_bytes(acc[m][p], weights[p], word);
              settle(sum);
              acc[m][p] = sum;
            });
          });
        });
      for_each<M>([&](auto m) {
        IntReg total[regs];
        for_each<regs>([&](auto p) { total[p] = narrow ? add_narrow(IntReg{}, acc[m][p]) : acc[m][p]; });
        if (span.correction || span.zero) {
          for_each<regs>([&](auto p) {
            total[p] += span.correction * input(m).total;
            if (span.zero) total[p] -= load_reg(w.zero[g] + lane + p * kRegLanes) * input(m).total;
          });
        }
        FloatReg sum[regs];
        for_each<regs>([&](auto p) {
          const int at = lane + p * kRegLanes;
          const FloatReg scale = load_reg(w.scale[g] + at) * input(m).scale;
          sum[p] = multiply_add(load_reg(sums[m] + at), __builtin_convertvector(total[p], FloatReg), scale);
        });
        if (span.minimum) {
          const FloatReg scaled_total = input(m).scaled_total - FloatReg{};
          for_each<regs>([&](auto p) {
            sum[p] = multiply_add(sum[p], load_reg(w.minimum[g] + lane + p * kRegLanes), scaled_total);
          });
        }
        for_each<regs>([&](auto p) { store(sums[m] + lane + p * kRegLanes, sum[p]); });
      });
    }
  }
}

typedef void Multiply(const Span& span, const Rows& rows, const int32_t* x, const InputGroup* group,
                      float (*sums)[kPanel]);
struct Multipliers { Multiply* of_rows[kCodeTile]; };  // for 1, 2, ... rows

template <int Group, bool narrow, int... I>
constexpr Multipliers make_multipliers(std::integer_sequence<int, I...>) {
  return {{multiply<Group, narrow, I + 1>...}};
}

// Compute a panel with quantized weights.
template <class Format>
void tile_codes(const Linear& layer, int number, const Rows& x, int r, int rows, float (*out)[kPanel]) {
  static constexpr Multipliers multipliers =
      make_multipliers<Format::group, Format::narrow>(std::make_integer_sequence<int, kCodeTile>());
  constexpr int span_words = kSpan * Format::bits / 32 * kPanel;
  constexpr int words = byte_words(Format::value_bits);
  const Linear panel = from_panel(layer, number);
  if (rows == 1)
    return tile_row<Format>(panel, x.words + size_t(r) * x.stride, x.group + size_t(r) * x.groups, out);
  const auto* w = static_cast<const int32_t*>(panel.weight);
  Unpacked weights;
  const int correction = Format::narrow ? Format::center(layer.offset) - layer.offset : 0;
  Span span{&weights, 0, correction, panel.minimum != nullptr, panel.zero != nullptr};
  const int tiles = parts(rows, kCodeTile);
  std::memset(out, 0, sizeof(*out) * rows);
  for (int begin = 0; begin < layer.inputs; begin += kSpan, w += span_words) {
    const int first = begin / Format::group;
    span.groups = std::min(kSpan, layer.inputs - begin) / Format::group;
    unpack<Format>(panel, w, first, span.groups, weights);
    span.lines = parts(Format::group * Format::bits / 16 / kPasses, tiles);
    for (int i = 0; i < tiles; i++) {
      const int m = part_begin(rows, tiles, i), count = part_begin(rows, tiles, i + 1) - m;
      span.ahead = w + span_words + i * kPasses * span.lines * span.groups * kLine;
      multipliers.of_rows[count - 1](span, x, x.words + size_t(r + m) * x.stride + begin / 4 * words,
                                     x.group + size_t(r + m) * x.groups + first, out + m);
    }
  }
}

template <class Element, int... I>
void tile_elements(const Linear& layer, int panel, const Rows& x, int r, int rows, float (*out)[kPanel],
                   std::integer_sequence<int, I...>) {
  typedef void Function(const Linear&, int, const Rows&, int, float (*)[kPanel]);
  static constexpr Function* functions[] = {tile_words<Element, I + 1>...};
  const int tiles = parts(rows, kTile);
  for (int i = 0; i < tiles; i++) {
    const int m = part_begin(rows, tiles, i), count = part_begin(rows, tiles, i + 1) - m;
    functions[count - 1](layer, panel, x, r + m, out + m);
  }
}

template <class Format>
void tiles(const Linear& layer, int panel, const Rows& x, int r, int rows, float (*out)[kPanel]) {
  if constexpr (kIsElement<Format>)
    tile_elements<Format>(layer, panel, x, r, rows, out, std::make_integer_sequence<int, kTile>());
  else
    tile_codes<Format>(layer, panel, x, r, rows, out);
}

}  // namespace outrider
