// Reads the quantized blocks of GGUF files: packs them into the panels of `Linear` without loss, or dequantizes them.
//
// A weight is (value - offset) * scale + minimum. In types of two levels, scale and minimum of a group are a half float
// of the block times a small integer of the group. The layout of each type is that of ggml-quants.h of llama.cpp.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "parallel.h"
#include "weights.h"

namespace outrider {

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

// The contents of a block. The arrays hold as much as the largest type needs.
struct Block {
  uint8_t code[kSuperBlock];
  uint16_t scale, minimum;  // half floats; or `scale` is an exponent
  int8_t sub_scale[kSuperBlock / kSmallGroup], sub_minimum[kSuperBlock / kSmallGroup];
};

inline uint16_t half_at(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, sizeof half);
  return half;
}

// Write the low halves of `count` bytes, and then the high ones.
template <int count>
inline void read_nibbles(const uint8_t* bytes, uint8_t* code) {
  constexpr uint64_t mask = 0x0f0f0f0f0f0f0f0fu;
  for (int i = 0; i < count; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, bytes + i, sizeof eight);
    const uint64_t low = eight & mask, high = eight >> 4 & mask;
    std::memcpy(code + i, &low, sizeof low);
    std::memcpy(code + count + i, &high, sizeof high);
  }
}

// Add bits first, first + 1, ... of 32 bytes to `parts` times 32 codes, as bit `to`. Each part takes `width` bits.
// Compilers turn the loop into vector operations, as its length is constant and the pointers do not overlap.
template <int width, int to>
inline void add_bits(const uint8_t* __restrict bytes, int first, int parts, uint8_t* __restrict code) {
  for (int part = 0; part < parts; part++)
    for (int i = 0; i < 32; i++) code[32 * part + i] |= (bytes[i] >> (first + width * part) & ((1 << width) - 1)) << to;
}

// Add the bits of 4 bytes to 32 codes, as their fifth bits.
inline void add_fifth_bits(const uint8_t* bytes, uint8_t* code) {
  for (int i = 0; i < 4; i++) {
    const uint64_t single = bytes[i] * 0x0101010101010101u & 0x8040201008040201u;  // bit j of the byte, in byte j
    uint64_t eight;
    std::memcpy(&eight, code + 8 * i, sizeof eight);
    eight |= (single + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
    std::memcpy(code + 8 * i, &eight, sizeof eight);
  }
}

// Read 8 scales and 8 minima of 6 bits each from 12 bytes.
inline void read_six_bits(const uint8_t* bytes, Block& block) {
  for (int i = 0; i < 4; i++) {
    block.sub_scale[i] = bytes[i] & 63;
    block.sub_minimum[i] = bytes[4 + i] & 63;
    block.sub_scale[4 + i] = (bytes[8 + i] & 15) | (bytes[i] >> 2 & 48);
    block.sub_minimum[4 + i] = bytes[8 + i] >> 4 | (bytes[4 + i] >> 2 & 48);
  }
}

constexpr uint16_t kHalfSign = 0x8000;

template <class Codes, int Offset, bool HasMinimum, bool TwoLevels>
struct Type : Codes {
  static constexpr int offset = Offset;
  static constexpr bool has_minimum = HasMinimum, two_levels = TwoLevels;
  static constexpr int elements = TwoLevels ? kSuperBlock : 32;
};

struct Q8_0 : Type<Codes<8, 32>, 128, false, false> {
  static constexpr int size = 34;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    for (int i = 0; i < 32; i++) block.code[i] = from[2 + i] ^ 128;
  }
};

template <class Codes, int Offset>
struct FourBits : Type<Codes, Offset, false, false> {
  static constexpr int size = 18;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    read_nibbles<16>(from + 2, block.code);
  }
};
using Q4_0 = FourBits<Codes<4, 32>, 8>;
using IQ4_NL = FourBits<Codes<4, 32, Values::kIQ4>, kIQ4Offset>;

struct Q4_1 : Type<Codes<4, 32>, 0, true, false> {
  static constexpr int size = 20;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    block.minimum = half_at(from + 2);
    read_nibbles<16>(from + 4, block.code);
  }
};

struct Q5_0 : Type<Codes<5, 32>, 16, false, false> {
  static constexpr int size = 22;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    read_nibbles<16>(from + 6, block.code);
    add_fifth_bits(from + 2, block.code);
  }
};

struct Q5_1 : Type<Codes<5, 32>, 0, true, false> {
  static constexpr int size = 24;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    block.minimum = half_at(from + 2);
    read_nibbles<16>(from + 8, block.code);
    add_fifth_bits(from + 4, block.code);
  }
};

struct MXFP4 : Type<Codes<4, 32, Values::kFP4>, kFP4Offset, false, false> {
  static constexpr int size = 17;
  static void read(const uint8_t* from, Block& block) {
    block.scale = from[0];  // an exponent of which 128 is subtracted: the codes stand for twice their values
    read_nibbles<16>(from + 1, block.code);
  }
};

struct IQ4_XS : Type<Codes<4, 32, Values::kIQ4>, kIQ4Offset, false, true> {
  static constexpr int size = 136;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    const int upper = half_at(from + 2);
    for (int i = 0; i < 8; i++) {
      const int lower = from[4 + i / 2] >> (4 * (i % 2)) & 15;
      block.sub_scale[i] = int8_t((lower | (upper >> (2 * i) & 3) << 4) - 32);
      read_nibbles<16>(from + 8 + 16 * i, block.code + 32 * i);
    }
  }
};

struct Q2_K : Type<Codes<2, 16>, 0, true, true> {
  static constexpr int size = 84;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from + 80);
    block.minimum = half_at(from + 82) ^ kHalfSign;
    std::memcpy(block.sub_scale, from, 16);  // scales in the lower halves, minima in the upper ones
    std::memset(block.code, 0, sizeof block.code);
    for (int half = 0; half < 2; half++) add_bits<2, 0>(from + 16 + 32 * half, 0, 4, block.code + 128 * half);
  }
};

struct Q3_K : Type<Codes<3, 16>, 4, false, true> {
  static constexpr int size = 110;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from + 108);
    const uint8_t* scales = from + 96;
    for (int i = 0; i < 16; i++) {
      const int lower = scales[i % 8] >> (i / 8 * 4) & 15;
      block.sub_scale[i] = int8_t((lower | (scales[8 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32);
    }
    std::memset(block.code, 0, sizeof block.code);
    for (int half = 0; half < 2; half++) {
      add_bits<2, 0>(from + 32 + 32 * half, 0, 4, block.code + 128 * half);
      add_bits<1, 2>(from, 4 * half, 4, block.code + 128 * half);
    }
  }
};

struct Q4_K : Type<Codes<4, 32>, 0, true, true> {
  static constexpr int size = 144;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    block.minimum = half_at(from + 2) ^ kHalfSign;
    read_six_bits(from + 4, block);
    for (int i = 0; i < 4; i++) read_nibbles<32>(from + 16 + 32 * i, block.code + 64 * i);
  }
};

struct Q5_K : Type<Codes<5, 32>, 0, true, true> {
  static constexpr int size = 176;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    block.minimum = half_at(from + 2) ^ kHalfSign;
    read_six_bits(from + 4, block);
    for (int i = 0; i < 4; i++) read_nibbles<32>(from + 48 + 32 * i, block.code + 64 * i);
    add_bits<1, 4>(from + 16, 0, 8, block.code);
  }
};

struct Q6_K : Type<Codes<6, 16>, 32, false, true> {
  static constexpr int size = 210;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from + 208);
    std::memcpy(block.sub_scale, from + 192, 16);
    for (int half = 0; half < 2; half++) {
      read_nibbles<64>(from + 64 * half, block.code + 128 * half);
      add_bits<2, 4>(from + 128 + 32 * half, 0, 4, block.code + 128 * half);
    }
  }
};

inline float number_at(const void* values, Number number, size_t at) {
  if (number == Number::kFloat) return static_cast<const float*>(values)[at];
  if (number == Number::kExponent) return power_of(static_cast<const uint8_t*>(values)[at]);
  const uint16_t half = static_cast<const uint16_t*>(values)[at];
  return number == Number::kHalf ? half_to_float(half) : to_float(half);
}

void read_row(const Linear& layer, int row, int size, float* out) {
  const Linear panel = from_panel(layer, row / kPanel);
  const int lane = row % kPanel;
  if (layer.values == Values::kHalf) {
    const auto* halves = static_cast<const uint16_t*>(panel.weight) + lane;
    for (int i = 0; i < size; i++) out[i] = half_to_float(halves[size_t(i) * kPanel]);
    return;
  }
  if (layer.bits >= 16) {
    const auto* words = static_cast<const uint32_t*>(panel.weight) + lane;
    for (int i = 0; i < size; i++) {
      const uint32_t word = words[size_t(i * layer.bits / 32) * kPanel];
      out[i] = layer.bits == 32 ? bits<float>(word) : to_float(uint16_t(word >> i % 2 * 16));
    }
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

// A matrix in blocks, and where it is written.
struct BlockMatrix {
  const uint8_t* const* row;  // [outputs] the first block of each output
  int32_t* words;             // as `Linear::weight`, and the following ones as in `Linear`; zero before
  void* scale;
  uint16_t* minimum;
  int8_t* sub_scale;
  int8_t* sub_minimum;
  float* dense;               // [outputs][inputs]; only for `outrider_dequantize`
  int32_t inputs, outputs;
};

inline int panels(int outputs) { return (outputs + kPanel - 1) / kPanel; }

template <class Kind>
void pack_panel(const BlockMatrix& matrix, int panel) {
  constexpr int block_words = Kind::elements * Kind::bits / 32, block_groups = Kind::elements / Kind::group;
  const int words = padded(matrix.inputs) * Kind::bits / 32, groups = padded(matrix.inputs) / Kind::group;
  const int scales = Kind::two_levels ? padded(matrix.inputs) / kSuperBlock : groups;
  const int rows = std::min(kPanel, matrix.outputs - panel * kPanel);
  Block block;
  for (int i = 0; i < matrix.inputs / Kind::elements; i++) {
    for (int r = 0; r < rows; r++) {
      Kind::read(matrix.row[panel * kPanel + r] + size_t(i) * Kind::size, block);
      int32_t* to = matrix.words + (size_t(panel) * words + size_t(i) * block_words) * kPanel + r;
      for (int chunk = 0; chunk < Kind::elements / kChunk; chunk++)
        write_chunk<Kind::bits>(block.code + chunk * kChunk, to + chunk * Kind::bits * kPanel, kPanel);
      const size_t at = (size_t(panel) * scales + i) * kPanel + r;
      std::memcpy(static_cast<char*>(matrix.scale) + at * size_of(Kind::number), &block.scale, size_of(Kind::number));
      if constexpr (Kind::has_minimum) matrix.minimum[at] = block.minimum;
      if constexpr (!Kind::two_levels) continue;
      for (int g = 0; g < block_groups; g++) {
        const size_t sub = (size_t(panel) * groups + i * block_groups + g) * kPanel + r;
        matrix.sub_scale[sub] = block.sub_scale[g];
        if constexpr (Kind::has_minimum && !Kind::joint_scales) matrix.sub_minimum[sub] = block.sub_minimum[g];
      }
    }
  }
}

template <class Kind>
void dequantize_row(const BlockMatrix& matrix, int output) {
  Block block;
  float* out = matrix.dense + size_t(output) * matrix.inputs;
  const auto number = [](uint16_t raw) {
    return Kind::number == Number::kExponent ? power_of(uint8_t(raw)) : half_to_float(raw);
  };
  for (int i = 0; i < matrix.inputs / Kind::elements; i++, out += Kind::elements) {
    Kind::read(matrix.row[output] + size_t(i) * Kind::size, block);
    if constexpr (Kind::table != Values::kPlain)
      for (int j = 0; j < Kind::elements; j++) block.code[j] = table_entries<Kind::table>()[block.code[j]];
    for (int g = 0; g < Kind::elements / Kind::group; g++) {
      float scale = number(block.scale), minimum = Kind::has_minimum ? number(block.minimum) : 0.0f;
      if constexpr (Kind::joint_scales) {
        scale *= block.sub_scale[g] & 15;
        minimum *= uint8_t(block.sub_scale[g]) >> 4;
      } else if constexpr (Kind::two_levels) {
        scale *= block.sub_scale[g];
        if constexpr (Kind::has_minimum) minimum *= block.sub_minimum[g];
      }
      dequantize_group(block.code + g * Kind::group, Kind::group, Kind::offset, scale, minimum, out + g * Kind::group);
    }
  }
}

// A matrix of half floats. Its blocks are single numbers.
struct F16 {};

template <>
void pack_panel<F16>(const BlockMatrix& matrix, int panel) {
  auto* to = reinterpret_cast<uint16_t*>(matrix.words) + size_t(panel) * padded(matrix.inputs) * kPanel;
  const int rows = std::min(kPanel, matrix.outputs - panel * kPanel);
  constexpr int kAtOnce = 32;  // inputs, so that the output stays in the cache
  for (int begin = 0; begin < matrix.inputs; begin += kAtOnce)
    for (int r = 0; r < rows; r++)
      for (int i = begin; i < std::min(begin + kAtOnce, matrix.inputs); i++)
        to[size_t(i) * kPanel + r] = half_at(matrix.row[panel * kPanel + r] + 2 * i);
}

template <>
void dequantize_row<F16>(const BlockMatrix& matrix, int output) {
  float* out = matrix.dense + size_t(output) * matrix.inputs;
  for (int i = 0; i < matrix.inputs; i++) out[i] = half_to_float(half_at(matrix.row[output] + 2 * i));
}

// Return a word with the 4-bit integers 0 4 1 5 2 6 3 7 of one that has them in order.
inline uint32_t spread(uint32_t word) {
  for (const auto& [bits, mask] : {std::pair{8, 0xff00u}, std::pair{4, 0xf000f0u}}) {
    const uint32_t differing = (word ^ (word >> bits)) & mask;
    word ^= differing ^ (differing << bits);
  }
  return word;
}

constexpr int kWordTile = 32;  // words of a row that are packed at a time

// Pack rows of integers of 8 or 4 bits. A row is words, which have the integers from the lowest bits on.
void pack_integers(const BlockMatrix& matrix, int bits) {
  const int words = padded(matrix.inputs) * bits / 32, filled = (matrix.inputs * bits + 31) / 32;
  parallel_for(panels(matrix.outputs), [&](int panel) {
    int32_t* to = matrix.words + size_t(panel) * words * kPanel;
    const int rows = std::min(kPanel, matrix.outputs - panel * kPanel);
    for (int begin = 0; begin < filled; begin += kWordTile) {  // a tile of all rows fits into the first-level cache
      const int end = std::min(begin + kWordTile, filled);
      for (int r = 0; r < rows; r++) {
        const uint8_t* from = matrix.row[panel * kPanel + r];
        for (int w = begin; w < end; w++) {
          uint32_t word;
          std::memcpy(&word, from + 4 * w, 4);
          to[size_t(w) * kPanel + r] = int32_t(bits == 4 ? spread(word) : word);
        }
      }
    }
  });
}

constexpr int kColumns = 16;  // words of a row that are transposed together

// Exchange integers of 4 bits in eight rows of words: integer r of row k becomes integer k of row r.
inline void transpose_eight(uint32_t (&rows)[8][kColumns]) {
  constexpr uint32_t masks[] = {0x0f0f0f0f, 0x00ff00ff, 0x0000ffff};
  for (int step = 4, stage = 2; step; step /= 2, stage--) {
    for (int r = 0; r < 8; r++) {
      if (r & step) continue;
      for (int c = 0; c < kColumns; c++) {
        const uint32_t differing = ((rows[r][c] >> 4 * step) ^ rows[r + step][c]) & masks[stage];
        rows[r + step][c] ^= differing;
        rows[r][c] ^= differing << 4 * step;
      }
    }
  }
}

// Write rows [8 * words][inputs / 8] of words with eight inputs from words [inputs][words] with eight outputs, which are
// in the order 0 2 4 6 1 3 5 7.
void transpose_integers(const uint32_t* from, uint32_t* to, int inputs, int words) {
  constexpr int place[] = {0, 4, 1, 5, 2, 6, 3, 7};  // of each output
  parallel_for((words + kColumns - 1) / kColumns, [&](int part) {
    const int begin = part * kColumns;
    const int count = std::min(kColumns, words - begin);
    for (int i = 0; i < inputs; i += 8) {
      uint32_t rows[8][kColumns] = {};
      for (int r = 0; r < 8; r++) std::memcpy(rows[r], from + size_t(i + r) * words + begin, count * sizeof(uint32_t));
      transpose_eight(rows);
      uint32_t* out = to + size_t(begin) * inputs + i / 8;
      for (int c = 0; c < count; c++) {
        for (int o = 0; o < 8; o++) out[size_t(8 * c + o) * (inputs / 8)] = rows[place[o]][c];
      }
    }
  });
}

struct Reader {
  const char* name;
  void (*pack_panel)(const BlockMatrix&, int panel);
  void (*dequantize_row)(const BlockMatrix&, int output);
};

template <class Kind>
constexpr Reader reader(const char* name) {
  return {name, pack_panel<Kind>, dequantize_row<Kind>};
}

constexpr Reader kReaders[] = {
    reader<Q8_0>("Q8_0"), reader<Q4_0>("Q4_0"), reader<Q4_1>("Q4_1"),     reader<Q5_0>("Q5_0"),     reader<Q5_1>("Q5_1"),
    reader<Q2_K>("Q2_K"), reader<Q3_K>("Q3_K"), reader<Q4_K>("Q4_K"),     reader<Q5_K>("Q5_K"),     reader<Q6_K>("Q6_K"),
    reader<F16>("F16"),   reader<MXFP4>("MXFP4"), reader<IQ4_NL>("IQ4_NL"), reader<IQ4_XS>("IQ4_XS"),
};

inline const Reader& find_reader(const char* name) {
  for (const Reader& each : kReaders) {
    if (!std::strcmp(each.name, name)) return each;
  }
  return kReaders[0];  // Python checks the name
}

}  // namespace outrider

using namespace outrider;

extern "C" void outrider_pack_blocks(const char* name, const BlockMatrix* matrix) {
  const Reader& reader = find_reader(name);
  parallel_for(panels(matrix->outputs), [&](int panel) { reader.pack_panel(*matrix, panel); });
}

extern "C" void outrider_transpose_integers(const uint32_t* from, uint32_t* to, int inputs, int words) {
  transpose_integers(from, to, inputs, words);
}

extern "C" void outrider_pack_integers(const BlockMatrix* matrix, int bits) { pack_integers(*matrix, bits); }

extern "C" void outrider_dequantize(const char* name, const BlockMatrix* matrix) {
  const Reader& reader = find_reader(name);
  parallel_for(matrix->outputs, [&](int output) { reader.dequantize_row(*matrix, output); });
}

// Write the first rows and columns of a layer as floats [rows][columns].
extern "C" void outrider_unpack(const Linear* layer, int32_t rows, int32_t columns, float* out) {
  parallel_for(rows, [&](int row) { read_row(*layer, row, columns, out + size_t(row) * columns); });
}
