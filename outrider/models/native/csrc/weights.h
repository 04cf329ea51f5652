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
  kFP4,    // a float of 4 bits: doubled, it is an integer. The scales are exponents then
  kHalf,   // a half float
};

// The type of scales and minima. Half floats are those of GGUF blocks and of many other quantized checkpoints. An exponent
// is a byte: it stands for 2^(byte - 128).
enum class Number : int32_t { kBfloat16, kHalf, kFloat, kExponent };

constexpr size_t size_of(Number number) { return number == Number::kFloat ? 4 : number == Number::kExponent ? 1 : 2; }

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
  const size_t number_size = size_of(all.number);
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

// A format of quantized weights. `value_bits` are those of the numbers that are multiplied, which are not negative. Plain
// integers of 8 or 4 bits may have zero points, and scales of any `Number`. Other formats have one type of scales.
template <int Bits, int Group, Values Table = Values::kPlain>
struct Codes {
  static constexpr int bits = Bits, group = Group;
  static constexpr Values table = Table;
  static constexpr int value_bits = Table == Values::kIQ4 ? 8 : Table == Values::kFP4 ? 5 : Bits;
  static constexpr bool any_scales = Table == Values::kPlain && Bits % 4 == 0;
  static constexpr Number number = Table == Values::kFP4 ? Number::kExponent : Number::kHalf;
  static constexpr bool may_have_two_levels = Group < kGroup && Table != Values::kFP4;
  static constexpr bool joint_scales = Bits == 2;  // `sub_scale` holds the minimum, too

  // Products are summed in 16-bit numbers if the processor has instructions for that. These sums are those of
  // (value - center) * input. They may overflow on the way, but the sum of a group fits. The center is the offset of the
  // layer, or the middle of all values if sums with the offset would not fit.
  static constexpr bool narrow = sums_narrow(value_bits);
  static constexpr int last_value = Table == Values::kFP4 ? 24 : (1 << value_bits) - 1, middle = (last_value + 1) / 2;
  static constexpr bool fits(int center) {
    return std::max(center, last_value - center) * (Group / 2) * 127 <= 32767;
  }
  static_assert(!narrow || fits(middle));
  static constexpr int subtracted = kSignedBytes && value_bits == 8 ? 128 : 0;  // from the values before the product
  static constexpr int center(int offset) {
    if (!narrow) return offset - subtracted;
    return fits(offset) ? offset : middle;
  }
};

// Call f with the format of a quantized layer.
template <class F>
inline decltype(auto) with_codes(const Linear& layer, F&& f) {
  const bool wide = layer.group == kGroup;
  if (layer.values == Values::kIQ4) return f(Codes<4, 32, Values::kIQ4>());
  if (layer.values == Values::kFP4) return f(Codes<4, 32, Values::kFP4>());
  if (layer.bits == 2) return f(Codes<2, 16>());
  if (layer.bits == 3) return f(Codes<3, 16>());
  if (layer.bits == 5) return f(Codes<5, 32>());
  if (layer.bits == 6) return f(Codes<6, 16>());
  if (layer.bits == 4) return wide ? f(Codes<4, kGroup>()) : f(Codes<4, 32>());
  return wide ? f(Codes<8, kGroup>()) : f(Codes<8, 32>());
}

// Call f with the format of a layer. The type of the elements is the format of weights that are not quantized.
template <class F>
inline decltype(auto) with_format(const Linear& layer, F&& f) {
  if (layer.bits == 32) return f(float());
  if (layer.values == Values::kHalf) return f(Half());
  return layer.bits == 16 ? f(uint16_t()) : with_codes(layer, f);
}

// The entries of a table, plus the offset of its format.
constexpr int kIQ4Offset = 128, kFP4Offset = 12;
constexpr uint8_t kIQ4Entries[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kFP4Entries[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <Values Table>
constexpr const uint8_t* table_entries() { return Table == Values::kIQ4 ? kIQ4Entries : kFP4Entries; }

// Write the first `size` entries of a row of a weight as floats, exactly. With an order, `size` is all of them.
void read_row(const Linear& layer, int row, int size, float* out);  // in blocks.cpp

}  // namespace outrider
