// Reads the quantized blocks of GGUF files: packs them into the panels of `Linear` without loss, or dequantizes them.
//
// A weight is (value - offset) * scale + minimum. In types of two levels, scale and minimum of a group are a half float
// of the block times a small integer of the group. The layout of each type is that of ggml-quants.h of llama.cpp.
#include <cstdint>
#include <cstring>
#include <utility>

#include "layout.h"
#include "linear.h"

namespace outrider {

// The contents of a block. The arrays hold as much as the largest type needs.
struct Block {
  uint8_t value[kSuperBlock];
  uint16_t scale, minimum;  // half floats
  int8_t sub_scale[kSuperBlock / kSmallGroup], sub_minimum[kSuperBlock / kSmallGroup];
};

inline uint16_t half_at(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, sizeof half);
  return half;
}

// Write the low halves of `count` bytes, and then the high ones.
inline void read_nibbles(const uint8_t* bytes, int count, uint8_t* value) {
  for (int i = 0; i < count; i++) value[i] = bytes[i] & 15;
  for (int i = 0; i < count; i++) value[count + i] = bytes[i] >> 4;
}

inline void add_fifth_bits(const uint8_t* bits, uint8_t* value) {
  for (int i = 0; i < 32; i++) value[i] |= (bits[i / 8] >> (i % 8) & 1) << 4;
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

template <int Bits, int Group, int Offset, bool HasMinimum, bool TwoLevels>
struct Format {
  static constexpr int bits = Bits, group = Group, offset = Offset;
  static constexpr bool has_minimum = HasMinimum, two_levels = TwoLevels;
  static constexpr int elements = TwoLevels ? kSuperBlock : 32;
};

struct Q8_0 : Format<8, 32, 128, false, false> {
  static constexpr int size = 34;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    for (int i = 0; i < 32; i++) block.value[i] = from[2 + i] ^ 128;
  }
};

struct Q4_0 : Format<4, 32, 8, false, false> {
  static constexpr int size = 18;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    read_nibbles(from + 2, 16, block.value);
  }
};

struct Q4_1 : Format<4, 32, 0, true, false> {
  static constexpr int size = 20;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    block.minimum = half_at(from + 2);
    read_nibbles(from + 4, 16, block.value);
  }
};

struct Q5_0 : Format<8, 32, 16, false, false> {
  static constexpr int size = 22;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    read_nibbles(from + 6, 16, block.value);
    add_fifth_bits(from + 2, block.value);
  }
};

struct Q5_1 : Format<8, 32, 0, true, false> {
  static constexpr int size = 24;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    block.minimum = half_at(from + 2);
    read_nibbles(from + 8, 16, block.value);
    add_fifth_bits(from + 4, block.value);
  }
};

struct Q4_K : Format<4, 32, 0, true, true> {
  static constexpr int size = 144;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    block.minimum = half_at(from + 2) ^ kHalfSign;
    read_six_bits(from + 4, block);
    for (int i = 0; i < 4; i++) read_nibbles(from + 16 + 32 * i, 32, block.value + 64 * i);
  }
};

struct Q5_K : Format<8, 32, 0, true, true> {
  static constexpr int size = 176;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    block.minimum = half_at(from + 2) ^ kHalfSign;
    read_six_bits(from + 4, block);
    for (int i = 0; i < 4; i++) read_nibbles(from + 48 + 32 * i, 32, block.value + 64 * i);
    for (int i = 0; i < kSuperBlock; i++) block.value[i] |= (from[16 + i % 32] >> (i / 32) & 1) << 4;
  }
};

struct Q6_K : Format<8, 16, 32, false, true> {
  static constexpr int size = 210;
  static void read(const uint8_t* from, Block& block) {
    block.scale = half_at(from + 208);
    std::memcpy(block.sub_scale, from + 192, 16);
    for (int half = 0; half < 2; half++) {
      uint8_t* value = block.value + 128 * half;
      const uint8_t* high = from + 128 + 32 * half;
      read_nibbles(from + 64 * half, 64, value);
      for (int i = 0; i < 128; i++) value[i] |= (high[i % 32] >> (2 * (i / 32)) & 3) << 4;
    }
  }
};

// A matrix in blocks, and where it is written.
struct BlockMatrix {
  const uint8_t* const* row;  // [outputs] the first block of each output
  int32_t* words;             // as `Linear::weight`, and the following ones as in `Linear`; zero before
  uint16_t* scale;
  uint16_t* minimum;
  int8_t* sub_scale;
  int8_t* sub_minimum;
  float* dense;               // [outputs][inputs]; only for `outrider_dequantize`
  int32_t inputs, outputs;
};

// Return the word `w` of the values of a block.
template <int Bits>
inline int32_t word_of(const uint8_t* value, int w) {
  int32_t word;
  if constexpr (Bits == 8) {
    std::memcpy(&word, value + 4 * w, 4);
    return word;
  }
  uint8_t bytes[4];
  for (int i = 0; i < 4; i++) bytes[i] = value[8 * w + i] | value[8 * w + 4 + i] << 4;
  std::memcpy(&word, bytes, 4);
  return word;
}

template <class Type>
void pack_panel(const BlockMatrix& matrix, int panel) {
  constexpr int block_words = Type::elements * Type::bits / 32, block_groups = Type::elements / Type::group;
  const int words = padded(matrix.inputs) * Type::bits / 32, groups = padded(matrix.inputs) / Type::group;
  const int scales = Type::two_levels ? padded(matrix.inputs) / kSuperBlock : groups;
  const int rows = std::min(kPanel, matrix.outputs - panel * kPanel);
  Block block;
  for (int i = 0; i < matrix.inputs / Type::elements; i++) {
    for (int r = 0; r < rows; r++) {
      Type::read(matrix.row[panel * kPanel + r] + size_t(i) * Type::size, block);
      int32_t* to = matrix.words + (size_t(panel) * words + size_t(i) * block_words) * kPanel + r;
      for (int w = 0; w < block_words; w++) to[w * kPanel] = word_of<Type::bits>(block.value, w);
      const size_t at = (size_t(panel) * scales + i) * kPanel + r;
      matrix.scale[at] = block.scale;
      if constexpr (Type::has_minimum) matrix.minimum[at] = block.minimum;
      if constexpr (!Type::two_levels) continue;
      for (int g = 0; g < block_groups; g++) {
        const size_t sub = (size_t(panel) * groups + i * block_groups + g) * kPanel + r;
        matrix.sub_scale[sub] = block.sub_scale[g];
        if constexpr (Type::has_minimum) matrix.sub_minimum[sub] = block.sub_minimum[g];
      }
    }
  }
}

// The product and the sum are rounded one after the other, as in other implementations.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("fp-contract=off")))
#endif
inline void add_minimum(float* out, float minimum, int count) {
  for (int i = 0; i < count; i++) out[i] += minimum;
}

template <class Type>
void dequantize_row(const BlockMatrix& matrix, int output) {
  Block block;
  float* out = matrix.dense + size_t(output) * matrix.inputs;
  for (int i = 0; i < matrix.inputs / Type::elements; i++, out += Type::elements) {
    Type::read(matrix.row[output] + size_t(i) * Type::size, block);
    for (int g = 0; g < Type::elements / Type::group; g++) {
      float scale = half_to_float(block.scale), minimum = Type::has_minimum ? half_to_float(block.minimum) : 0.0f;
      if constexpr (Type::two_levels) {
        scale *= block.sub_scale[g];
        minimum *= block.sub_minimum[g];
      }
      float* group = out + g * Type::group;
      for (int j = 0; j < Type::group; j++) group[j] = (block.value[g * Type::group + j] - Type::offset) * scale;
      if constexpr (Type::has_minimum) add_minimum(group, minimum, Type::group);
    }
  }
}

template <class Type>
void pack(const BlockMatrix& matrix) {
#pragma omp parallel for schedule(static)
  for (int panel = 0; panel < (matrix.outputs + kPanel - 1) / kPanel; panel++) pack_panel<Type>(matrix, panel);
}

template <class Type>
void dequantize(const BlockMatrix& matrix) {
#pragma omp parallel for schedule(static)
  for (int output = 0; output < matrix.outputs; output++) dequantize_row<Type>(matrix, output);
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
#pragma omp parallel for schedule(static)
  for (int panel = 0; panel < (matrix.outputs + kPanel - 1) / kPanel; panel++) {
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
  }
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
#pragma omp parallel for schedule(static)
  for (int begin = 0; begin < words; begin += kColumns) {
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
  }
}

struct Reader {
  const char* name;
  int32_t bits, group, offset, has_minimum, two_levels;
  void (*pack)(const BlockMatrix&);
  void (*dequantize)(const BlockMatrix&);
};

template <class Type>
constexpr Reader reader(const char* name) {
  return {name, Type::bits, Type::group, Type::offset, Type::has_minimum, Type::two_levels, pack<Type>, dequantize<Type>};
}

constexpr Reader kReaders[] = {
    reader<Q8_0>("Q8_0"), reader<Q4_0>("Q4_0"), reader<Q4_1>("Q4_1"), reader<Q5_0>("Q5_0"),
    reader<Q5_1>("Q5_1"), reader<Q4_K>("Q4_K"), reader<Q5_K>("Q5_K"), reader<Q6_K>("Q6_K"),
};

inline const Reader& find_reader(const char* name) {
  for (const Reader& each : kReaders) {
    if (!std::strcmp(each.name, name)) return each;
  }
  return kReaders[0];  // Python checks the name
}

}  // namespace outrider

using namespace outrider;

OUTRIDER_LAYOUT(BlockMatrix, row, words, scale, minimum, sub_scale, sub_minimum, dense, inputs, outputs)

extern "C" void outrider_pack_blocks(const char* name, const BlockMatrix* matrix) { find_reader(name).pack(*matrix); }

extern "C" void outrider_transpose_integers(const uint32_t* from, uint32_t* to, int inputs, int words) {
  transpose_integers(from, to, inputs, words);
}

extern "C" void outrider_pack_integers(const BlockMatrix* matrix, int bits) { pack_integers(*matrix, bits); }

extern "C" void outrider_dequantize(const char* name, const BlockMatrix* matrix) {
  find_reader(name).dequantize(*matrix);
}
