// Products of one panel of weights with a few rows of inputs, for every format of weights.
//
// Sums of a row add up its products in the same order, with the same instructions, for any number of rows.
#pragma once

#include "linear.h"

namespace outrider {

// Whether a format is the type of weights that are not quantized.
template <class Format>
constexpr bool kIsElement = std::is_same_v<Format, float> || std::is_same_v<Format, Half> || std::is_same_v<Format, uint16_t>;

// What is loaded for each output: a word, or one half float.
template <class Element>
using Stored = std::conditional_t<std::is_same_v<Element, Half>, uint16_t, int32_t>;

// Registers of outputs that are multiplied with an input of M rows at the same time.
template <int M>
constexpr int kElementRegs = std::min(kPanel / kRegLanes, M <= 2 ? 4 : 2);

// Return part `part` of the weights of the outputs of one register.
template <class Element>
inline IntReg weights_at(const Stored<Element>* w, int part) {
  if constexpr (std::is_same_v<Element, Half>) return bits<IntReg>(half_to_float_reg(w));
  else return kParts<Element> == 1 ? load_reg(w) : half_of(load_reg(w), part);
}

// Add the products of `count` words of inputs to the sums of M rows. The weights of the first word begin at w. Prefetch the
// weights from `ahead` on in their order: all that a word has, at each word whose number has none of the bits of `mask`.
template <class Element, int M>
void add_words(const Stored<Element>* w, const Stored<Element>* ahead, int mask, const int32_t* x, int stride, int count,
               float (*sums)[kPanel]) {
  constexpr int regs = kElementRegs<M>, width = regs * kRegLanes;
  for (int lane = 0; lane < kPanel; lane += width) {
    FloatReg acc[M][regs];
    for (int m = 0; m < M; m++)
      for (int p = 0; p < regs; p++) acc[m][p] = load_reg(sums[m] + lane + p * kRegLanes);
    for (int k = 0; k < count; k++) {
      if (!(k & mask)) {
        for (size_t i = 0; i < width * sizeof *w; i += 4 * kLine)
          __builtin_prefetch(reinterpret_cast<const char*>(ahead) + i);
        ahead += width;
      }
      for (int part = 0; part < kParts<Element>; part++) {
        IntReg weights[regs];
        for (int p = 0; p < regs; p++) weights[p] = weights_at<Element>(w + k * kPanel + lane + p * kRegLanes, part);
        for (int m = 0; m < M; m++) {
          const IntReg word = IntReg{} + x[size_t(m) * stride + kParts<Element> * k + part];
          for (int p = 0; p < regs; p++) acc[m][p] = dot_words<Input<Element>>(acc[m][p], weights[p], word);
        }
      }
    }
    for (int m = 0; m < M; m++)
      for (int p = 0; p < regs; p++) store(sums[m] + lane + p * kRegLanes, acc[m][p]);
  }
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

// The scales, minima and zero points of the groups of a span, as the numbers that are multiplied.
template <int Group>
struct alignas(64) Scales {
  float scale[kSpan / Group][kPanel], minimum[kSpan / Group][kPanel];
  int32_t zero[kSpan / Group][kPanel];

  // Read those of `groups` groups of a panel from number `first` on.
  template <class Format>
  void read(const Linear& panel, int first, int groups) {
    const bool two_levels = Format::may_have_two_levels && panel.sub_scale;
    for (int lane = 0; lane < kPanel; lane += kRegLanes) {
      if (two_levels) read_two_levels<Format>(panel, first, groups, lane);
      else read_one_level<Format>(panel, first, groups, lane);
    }
  }

 private:
  template <class Format>
  void read_one_level(const Linear& panel, int first, int groups, int lane) {
    const Number number = Format::any_scales ? panel.number : Format::number;
    for (int g = 0; g < groups; g++) {
      const size_t at = size_t(first + g) * kPanel + lane;
      store(scale[g] + lane, numbers(panel.scale, number, at));
      if (panel.minimum) store(minimum[g] + lane, numbers(panel.minimum, number, at));
      if (Format::any_scales && panel.zero) store(zero[g] + lane, byte_to_int_reg(panel.zero + at));
    }
  }

  template <class Format>
  void read_two_levels(const Linear& panel, int first, int groups, int lane) {
    const size_t block = size_t(first * Group / kSuperBlock) * kPanel + lane;
    const FloatReg block_scale = numbers(panel.scale, Number::kHalf, block);
    const FloatReg block_minimum = panel.minimum ? numbers(panel.minimum, Number::kHalf, block) : FloatReg{};
    for (int g = 0; g < groups; g++) {
      const size_t at = size_t(first + g) * kPanel + lane;
      IntReg sub_scale = byte_to_int_reg(panel.sub_scale + at), sub_minimum{};
      if (Format::joint_scales) {
        sub_minimum = sub_scale >> 4 & 15;
        sub_scale &= 15;
      } else if (panel.sub_minimum) {
        sub_minimum = byte_to_int_reg(panel.sub_minimum + at);
      }
      store(scale[g] + lane, block_scale * __builtin_convertvector(sub_scale, FloatReg));
      if (panel.minimum) store(minimum[g] + lane, block_minimum * __builtin_convertvector(sub_minimum, FloatReg));
    }
  }
};

// Weights as they are stored. Each product unpacks them in registers.
template <class Format>
struct Packed {
  static constexpr int group = Format::group, words = byte_words(Format::value_bits);
  static constexpr bool narrow = Format::narrow, may_have_zero = Format::any_scales;
  // Rows for which each tile unpacks the weights for itself. Joining planes costs more than loading what others unpacked.
  // Values of 8 bits without byte products take two words, so loading them costs more than unpacking them.
  static constexpr bool joined = widest_plane(Format::bits) < Format::bits;
  static constexpr int most_rows = joined ? 2 : words == 1 ? 2 * kCodeTile : kRowBlock;

  const int32_t* chunks;
  const Scales<group>& scales;

  // Return what is multiplied with a word of the inputs of a step, for the outputs of one register, which begin at `lane`.
  template <int step, int word>
  IntReg values(int chunk, int lane) const {
    return bytes_for<words>(values_at<Format>(chunks + chunk * Format::bits * kPanel + lane, step), word);
  }
};

// Weights that are unpacked once for many rows.
template <int Group, bool Narrow>
struct Unpacked {
  static constexpr int group = Group, words = Narrow ? 1 : byte_words(8);
  static constexpr bool narrow = Narrow, may_have_zero = Group >= kChunk;

  alignas(64) int32_t word[kSpan / 4 * words][kPanel];
  const Scales<group>& scales;

  template <class Format>
  Unpacked(const Packed<Format>& packed, int chunks) : scales(packed.scales) {
    for (int c = 0; c < chunks; c++)
      for (int lane = 0; lane < kPanel; lane += kRegLanes)
        for_each<kChunkSteps>([&](auto step) {
          for_each<words>([&](auto i) {
            store(word[(c * kChunkSteps + step) * words + i] + lane, packed.template values<step, i>(c, lane));
          });
        });
  }

  template <int step, int at>
  IntReg values(int chunk, int lane) const { return load_reg(word[(chunk * kChunkSteps + step) * words + at] + lane); }
};

// What the products of a span of inputs have in common.
struct Span {
  int groups;
  int correction;        // that is multiplied with the sum of the inputs of a group, and added
  bool minimum, zero;    // whether the weights have them
  const int32_t* ahead;  // weights that are needed next
  int lines;             // cache lines of them to prefetch for each group in each pass over the inputs
};

// Add the products of a group, which were summed as integers, to the sums of a row. All are those of one register of outputs.
template <bool with_minimum>
inline void add_scaled(float* sums, IntReg products, const float* scale, const float* minimum, const InputGroup& input) {
  const FloatReg scales = load_reg(scale) * input.scale;
  FloatReg sum = multiply_add(load_reg(sums), __builtin_convertvector(products, FloatReg), scales);
  if (with_minimum) sum = multiply_add(sum, load_reg(minimum), input.scaled_total - FloatReg{});
  store(sums, sum);
}

// Add the products of group `g` of a span to the sums of M rows, for the outputs of `Regs` registers, which begin at `lane`.
// The group begins at step `First` of its chunk. The products stay in registers only if they are summed and added in one
// function, and if all lambdas are inlined.
template <int First, int M, int Regs, class Weights>
inline __attribute__((always_inline)) void add_group(const Weights& weights, const Span& span,
                                                     const RowSpan<Weights::words>* x, int g, int lane,
                                                     float (*sums)[kPanel]) {
  constexpr int group = Weights::group, words = Weights::words;
  const auto& scales = weights.scales;
  IntReg acc[M][Regs];
  for_each<M>([&](auto m) {
    for_each<Regs>([&](auto p) { acc[m][p] = IntReg{} + x[m].group[g].start; });
  });
  int first = g * (group / 4 * words);
  for (int c = 0; c < std::max(1, group / kChunk); c++, first += kChunkSteps * words)
    for_each<std::min(kChunk, group) / 4 * words>([&](auto k) {
      constexpr int step = First + decltype(k)::value / words, word = decltype(k)::value % words;
      IntReg values[Regs];
      for_each<Regs>([&](auto p) {
        values[p] = weights.template values<step, word>(g * group / kChunk + c, lane + p * kRegLanes);
      });
      for_each<M>([&](auto m) {
        const IntReg input = IntReg{} + x[m].word[first + k];
        for_each<Regs>([&](auto p) {
          IntReg sum = Weights::narrow ? dot_narrow(acc[m][p], values[p], input) : dot_bytes(acc[m][p], values[p], input);
          settle(sum);
          acc[m][p] = sum;
        });
      });
    });
  if (Weights::narrow)
    for_each<M>([&](auto m) {
      for_each<Regs>([&](auto p) { acc[m][p] = add_narrow(IntReg{}, acc[m][p]); });
    });
  if (span.correction)
    for_each<M>([&](auto m) {
      for_each<Regs>([&](auto p) { acc[m][p] += span.correction * x[m].group[g].total; });
    });
  if constexpr (Weights::may_have_zero)
    if (span.zero)
      for_each<M>([&](auto m) {
        for_each<Regs>([&](auto p) {
          acc[m][p] -= load_reg(scales.zero[g] + lane + p * kRegLanes) * x[m].group[g].total;
        });
      });
  const auto add = [&](auto with_minimum) {
    for_each<M>([&](auto m) {
      for_each<Regs>([&](auto p) {
        const int at = lane + p * kRegLanes;
        add_scaled<with_minimum>(sums[m] + at, acc[m][p], scales.scale[g] + at, scales.minimum[g] + at, x[m].group[g]);
      });
    });
  };
  if (span.minimum) add(std::true_type());
  else add(std::false_type());
}

// Registers of outputs that are multiplied with an input of M rows at the same time.
template <int M>
constexpr int kTileRegs = std::min(kPanel / kRegLanes, M == 1 ? 4 : 2);

// Add the products of a span to the sums of M rows.
template <class Weights, int M>
__attribute__((flatten)) void multiply(const Weights& weights, const Span& span, const RowSpan<Weights::words>* x,
                                       float (*sums)[kPanel]) {
  constexpr int regs = kTileRegs<M>;
  constexpr int groups = std::max(1, kChunk / Weights::group);  // that share a chunk
  const int32_t* ahead = span.ahead;
  for (int lane = 0; lane < kPanel; lane += regs * kRegLanes)
    for (int g = 0; g < span.groups; g += groups)
      for_each<groups>([&](auto part) {
        for (int i = 0; i < span.lines; i++, ahead += kLine) __builtin_prefetch(ahead);
        add_group<part * Weights::group / 4, M, regs>(weights, span, x, g + part, lane, sums);
      });
}

template <class Weights>
using Multiply = void(const Weights& weights, const Span& span, const RowSpan<Weights::words>* x,
                      float (*sums)[kPanel]);

// Add the products of a span to the sums of all rows, in tiles of nearly equal size with at most sizeof...(I) rows.
template <class Weights, int... I>
void multiply_tiles(const Weights& weights, Span span, const RowSpan<Weights::words>* x, int rows,
                    float (*sums)[kPanel], std::integer_sequence<int, I...>) {
  static constexpr Multiply<Weights>* multipliers[] = {multiply<Weights, I + 1>...};
  static constexpr int passes[] = {kPanel / (kTileRegs<I + 1> * kRegLanes)...};
  const int tiles = parts(rows, sizeof...(I)), lines = span.lines;
  for (int i = 0; i < tiles; i++) {
    const int m = part_begin(rows, tiles, i), count = part_begin(rows, tiles, i + 1) - m;
    span.lines = parts(lines, passes[count - 1] * tiles);
    multipliers[count - 1](weights, span, x + m, sums + m);
    span.ahead += passes[count - 1] * span.lines * span.groups * kLine;
  }
}

// Compute a panel with quantized weights.
template <class Format>
void tile_codes(const Linear& layer, int number, const Rows& x, int r, int rows, float (*out)[kPanel]) {
  constexpr int span_words = kSpan * Format::bits / 32 * kPanel;
  const Linear panel = from_panel(layer, number);
  const int correction = Format::narrow ? Format::center(layer.offset) - layer.offset : 0;
  const auto* chunks = static_cast<const int32_t*>(panel.weight);
  Scales<Format::group> scales;
  std::memset(out, 0, sizeof(*out) * rows);
  for (int begin = 0; begin < layer.inputs; begin += kSpan, chunks += span_words) {
    const int inputs = std::min(kSpan, layer.inputs - begin);
    // One row takes all weights in their order. More rows take a part of each line in several passes.
    const int32_t* ahead = chunks + (rows == 1 ? kAheadCodes / 4 : span_words);
    const Span span{inputs / Format::group, correction, panel.minimum != nullptr, panel.zero != nullptr, ahead,
                    Format::group * Format::bits / 16};
    scales.template read<Format>(panel, begin / Format::group, span.groups);
    const Packed<Format> packed{chunks, scales};
    const auto* row = row_span<packed.words>(x, begin / kSpan, r);
    if (rows <= packed.most_rows) {
      constexpr int tile = std::min(kCodeTile, packed.most_rows);
      multiply_tiles(packed, span, row, rows, out, std::make_integer_sequence<int, tile>());
    } else if constexpr (packed.most_rows < kRowBlock) {
      const Unpacked<Format::group, Format::narrow> unpacked(packed, inputs / kChunk);
      multiply_tiles(unpacked, span, row, rows, out, std::make_integer_sequence<int, kCodeTile>());
    }
  }
}

// Compute a panel with weights that are floats, half floats or bfloat16.
//
// All rows are multiplied with a run of words before the next ones, while these weights are in the cache. The passes over
// a run prefetch about as many weights as the run has, in their order, so that the memory is busy all the time.
template <class Element, int... I>
void tile_elements(const Linear& layer, int panel, const Rows& x, int r, int rows, float (*out)[kPanel],
                   std::integer_sequence<int, I...>) {
  static constexpr decltype(&add_words<Element, 1>) functions[] = {add_words<Element, I + 1>...};
  static constexpr bool one_pass[] = {kElementRegs<I + 1> * kRegLanes == kPanel...};
  const int words = layer.inputs / (std::is_same_v<Element, uint16_t> ? 2 : 1);
  const int tiles = parts(rows, kTile), run = tiles == 1 && one_pass[rows - 1] ? words : kRun;
  int mask = 0;  // each tile prefetches at one word in 1, 2, 4, ..., the largest power of 2 up to the number of tiles
  while (2 * mask + 2 <= tiles) mask = 2 * mask + 1;
  const auto* w = static_cast<const Stored<Element>*>(layer.weight) + size_t(panel) * words * kPanel;
  std::memset(out, 0, sizeof(*out) * rows);
  for (int k = 0; k < words; k += run, w += run * kPanel) {
    const int count = std::min(run, words - k);
    const auto* ahead = w + kAhead / sizeof *w;
    for (int i = 0; i < tiles; i++) {
      const int m = part_begin(rows, tiles, i), size = part_begin(rows, tiles, i + 1) - m;
      const int32_t* inputs = x.words + size_t(r + m) * x.stride + kParts<Element> * k;
      functions[size - 1](w, ahead, mask, inputs, x.stride, count, out + m);
      ahead += parts(count, mask + 1) * kPanel;
    }
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
