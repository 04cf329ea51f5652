// How the weights of a linear layer are stored, in panels of 32 outputs.
//
// A quantized weight is a code of 2 to 8 bits. A chunk has 32 inputs of each output. The bits of its codes lie in planes,
// whose widths are the powers of two that add up to the bits of a code: 6 bits are a plane of 4 and one of 2. The widest
// plane comes first and has the lowest bits. A plane of `width` bits takes `width` words of 32 bits for each output. A
// word holds 8 / width steps of four neighboring inputs: one byte for each input, the first step in the lowest bits.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "simd.h"

namespace outrider {

constexpr int kPanel = 2 * kLanes;  // outputs of a panel
constexpr int kGroup = 64;          // inputs that share a scale; input lengths are padded to a multiple of it
constexpr int kChunk = 32;          // inputs whose codes are stored together
constexpr int kChunkSteps = kChunk / 4;
constexpr int kSmallGroup = 16;     // the smallest group of a format of GGUF blocks
constexpr int kSuperBlock = 256;    // inputs that share the scale of their scales, in formats with two levels

// What the stored bits of a weight mean.
enum class Values : int32_t {
  kPlain,  // a number: an integer in 8 or fewer bits, bfloat16 in 16, float in 32
  kIQ4,    // an index of the values of IQ4_NL and IQ4_XS
  kFP4,    // a float of 4 bits: doubled, it is an integer. The scales are bfloat16 then
  kHalf,   // a half float
};

// The type of scales and minima. Half floats are those of GGUF blocks and of many other quantized checkpoints.
enum class Number : int32_t { kBfloat16, kHalf, kFloat };

// A quantized weight is (q - offset - zero) * scale + minimum. q is its code, or the entry of a table. Zero, scale and
// minimum are those of its group. In formats with two levels, scale and minimum are a half float of 256 inputs times a
// small integer of the group.
struct Linear {
  const void* weight;         // [outputs / 32][inputs * bits / 32][32] of 32 bits
  const void* scale;          // [outputs / 32][inputs / group, or / 256 with two levels][32]; null for 32 and 16 bits
  const void* minimum;        // the same, or null
  const int8_t* sub_scale;    // [outputs / 32][inputs / group][32] with two levels, else null
  const int8_t* sub_minimum;  // the same, or null. With 2 bits, `sub_scale` has them in its upper four bits
  const int8_t* zero;         // [outputs / 32][inputs / group][32], or null: all are 0
  const int32_t* order;       // [inputs] the input of each column of the weight, or null: they are in order
  const float* bias;          // [outputs] or null
  int32_t inputs, outputs;
  int32_t bits;               // 32, 16, 8, 6, 5, 4, 3 or 2
  int32_t group, offset;
  Values values;
  Number number;              // of scale and minimum
};

inline int padded(int size) { return (size + kGroup - 1) / kGroup * kGroup; }

// Return the part of a layer from a panel on.
inline Linear from_panel(const Linear& all, size_t panel) {
  const size_t groups = panel * (all.inputs / all.group) * kPanel;
  const size_t scales = all.sub_scale ? panel * (all.inputs / kSuperBlock) * kPanel : groups;
  const size_t number_size = all.number == Number::kFloat ? 4 : 2;
  Linear part = all;
  part.weight = static_cast<const int32_t*>(all.weight) + panel * (size_t(all.inputs) * all.bits / 32) * kPanel;
  if (all.scale) part.scale = static_cast<const char*>(all.scale) + scales * number_size;
  if (all.minimum) part.minimum = static_cast<const char*>(all.minimum) + scales * number_size;
  if (all.sub_scale) part.sub_scale += groups;
  if (all.sub_minimum) part.sub_minimum += groups;
  if (all.zero) part.zero += groups;
  if (all.bias) part.bias += panel * kPanel;
  part.outputs -= int(panel) * kPanel;
  return part;
}

constexpr int widest_plane(int bits) { return bits >= 8 ? 8 : bits >= 4 ? 4 : bits >= 2 ? 2 : 1; }

// A format of quantized weights. `value_bits` are those of the numbers that are multiplied, which are not negative. A
// format that is `AnyScales` has zero points or not, and scales of any `Number`. Other formats have no zero points, and
// one type of scales. Their kernels ask for neither.
template <int Bits, int Group, Values Table = Values::kPlain, bool AnyScales = false>
struct Codes {
  static constexpr int bits = Bits, group = Group;
  static constexpr Values table = Table;
  static constexpr int value_bits = Table == Values::kIQ4 ? 8 : Table == Values::kFP4 ? 5 : Bits;
  static constexpr bool any_scales = AnyScales;
  static constexpr Number number = Group == kGroup || Table == Values::kFP4 ? Number::kBfloat16 : Number::kHalf;
  static constexpr bool joint_scales = Bits == 2;  // `sub_scale` holds the minimum, too
};

// Call f with the format of a layer of 8 or 4 bits.
template <bool AnyScales, class F>
inline decltype(auto) with_integers(const Linear& layer, F&& f) {
  constexpr Values plain = Values::kPlain;
  const bool wide = layer.group == kGroup;
  if (layer.bits == 4) return wide ? f(Codes<4, kGroup, plain, AnyScales>()) : f(Codes<4, 32, plain, AnyScales>());
  return wide ? f(Codes<8, kGroup, plain, AnyScales>()) : f(Codes<8, 32, plain, AnyScales>());
}

// Call f with the format of a layer.
template <class F>
inline decltype(auto) with_codes(const Linear& layer, F&& f) {
  if (layer.values == Values::kIQ4) return f(Codes<4, 32, Values::kIQ4>());
  if (layer.values == Values::kFP4) return f(Codes<4, 32, Values::kFP4>());
  if (layer.bits == 2) return f(Codes<2, 16>());
  if (layer.bits == 3) return f(Codes<3, 16>());
  if (layer.bits == 5) return f(Codes<5, 32>());
  if (layer.bits == 6) return f(Codes<6, 16>());
  const Number usual = layer.group == kGroup ? Codes<4, kGroup>::number : Codes<4, 32>::number;
  return layer.zero || layer.number != usual ? with_integers<true>(layer, f) : with_integers<false>(layer, f);
}

// The entries of a table, plus the offset of its format.
constexpr int kIQ4Offset = 128, kFP4Offset = 12;
constexpr uint8_t kIQ4Entries[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kFP4Entries[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <Values Table>
constexpr const uint8_t* table_entries() { return Table == Values::kIQ4 ? kIQ4Entries : kFP4Entries; }

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

// Return the values of a step, one byte each.
template <class Format>
inline IntReg values_at(const int32_t* w, int step) {
  const IntReg codes = codes_at<Format::bits>(w, step);
  if constexpr (Format::table == Values::kPlain) return codes;
  return look_up(table_entries<Format::table>(), codes);
}

// Write the values of a chunk of one output. `w` is its first word.
template <class Format>
inline void read_chunk(const int32_t* w, uint8_t* values) {
  for (int i = 0; i < kChunk; i++) {
    int code = 0;
    const int32_t* plane = w;
    for (int left = Format::bits, to = 0; left;) {
      const int width = widest_plane(left), steps = 8 / width;
      const uint32_t word = uint32_t(plane[i / 4 / steps * kPanel]);
      code |= int(word >> (i / 4 % steps * width + i % 4 * 8) & ((1u << width) - 1)) << to;
      plane += width * kPanel;
      left -= width;
      to += width;
    }
    values[i] = uint8_t(Format::table == Values::kPlain ? code : table_entries<Format::table>()[code]);
  }
}

// Write the 32 codes of a chunk [32] to its words, of which neighbors are `stride` words apart.
template <int Bits>
inline void write_chunk(const uint8_t* codes, int32_t* w, int stride) {
  uint64_t eights[4];  // codes of two steps each
  std::memcpy(eights, codes, sizeof eights);
  constexpr int width = widest_plane(Bits);
  if constexpr (width == 8) {
    for (int i = 0; i < 8; i++) w[i * stride] = int32_t(eights[i / 2] >> (i % 2 * 32));
    return;
  }
  constexpr uint64_t mask = ((1u << width) - 1) * 0x0101010101010101u;
  constexpr int pairs = width == 4 ? 1 : width == 2 ? 2 : 4;  // of steps in a word
  for (int word = 0; word < width; word++) {
    uint64_t both = 0;
    for (int i = 0; i < pairs; i++) both |= (eights[word * pairs + i] & mask) << (2 * width * i);
    w[word * stride] = int32_t(uint32_t(both) | uint32_t(both >> 32) << width);
  }
  if constexpr (Bits > width) {
    uint8_t upper[kChunk];
    for (int i = 0; i < kChunk; i++) upper[i] = codes[i] >> width;
    write_chunk<Bits - width>(upper, w + width * stride, stride);
  }
}

// out = value * scale + minimum. The product and the sum are rounded one after the other, as in other implementations.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("fp-contract=off")))
#endif
inline void dequantize_group(const uint8_t* values, int count, int offset, float scale, float minimum, float* out) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
  for (int i = 0; i < count; i++) out[i] = float(values[i] - offset) * scale + minimum;
}

inline float number_at(const void* values, Number number, size_t at) {
  if (number == Number::kFloat) return static_cast<const float*>(values)[at];
  const uint16_t half = static_cast<const uint16_t*>(values)[at];
  return number == Number::kHalf ? half_to_float(half) : to_float(half);
}

// Write the first `size` entries of a row of a quantized weight as floats, exactly. With an order, `size` is all of them.
inline void read_row(const Linear& layer, int row, int size, float* out) {
  const Linear panel = from_panel(layer, row / kPanel);
  const int lane = row % kPanel;
  if (layer.values == Values::kHalf) {
    const auto* halves = static_cast<const uint16_t*>(panel.weight) + lane;
    for (int i = 0; i < size; i++) out[i] = half_to_float(halves[size_t(i) * kPanel]);
    return;
  }
  with_codes(layer, [&](auto format) {
    using Format = decltype(format);
    constexpr int span = std::min(kChunk, Format::group);  // inputs of a chunk with one scale
    const auto* w = static_cast<const int32_t*>(panel.weight) + lane;
    uint8_t values[kChunk];
    for (int i = 0; i < size; i += span) {
      if (i % kChunk == 0) read_chunk<Format>(w + size_t(i / kChunk) * Format::bits * kPanel, values);
      const size_t group = i / Format::group, at = group * kPanel + lane;
      const size_t number = panel.sub_scale ? group * Format::group / kSuperBlock * kPanel + lane : at;
      float scale = number_at(panel.scale, panel.number, number), minimum = 0;
      if (panel.minimum) minimum = number_at(panel.minimum, panel.number, number);
      if (panel.sub_scale) scale *= Format::joint_scales ? panel.sub_scale[at] & 15 : panel.sub_scale[at];
      if (Format::joint_scales) minimum *= uint8_t(panel.sub_scale[at]) >> 4;
      if (panel.sub_minimum) minimum *= panel.sub_minimum[at];
      const int count = std::min(span, size - i), offset = layer.offset + (panel.zero ? panel.zero[at] : 0);
      float group_out[span];
      float* to = layer.order ? group_out : out + i;
      dequantize_group(values + i % kChunk, count, offset, scale, minimum, to);
      if (!layer.order) continue;
      for (int j = 0; j < count; j++) out[layer.order[i + j]] = group_out[j];
    }
  });
}

}  // namespace outrider
