// The operations that processors have instructions for, written for any processor.
//
// `simd_x86.h` and `simd_neon.h` have the same operations. They use these where a processor lacks the instruction.
#pragma once

#include <cmath>

#include "vectors.h"

namespace outrider::plain {

// Whether an instruction multiplies pairs of bfloat16. If not, inputs are stored as rounded floats.
constexpr bool kBfloat16Pairs = false;

// Whether bytes are multiplied with bytes, and their products are added to 32-bit sums at once.
constexpr bool kByteProducts = false;

// Whether weights must be signed for that. If so, 128 is subtracted from values of 8 bits.
constexpr bool kSignedBytes = false;

// Whether products of values below 128 with bytes are summed in 16-bit numbers first.
constexpr bool kNarrowSums = false;

// Half floats as floats. Multiplying by 2^112 moves their exponent, and is exact for all finite numbers.
inline FloatReg half_to_float_reg(const uint16_t* from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kRegLanes)));
  Halves raw;
  std::memcpy(&raw, from, sizeof raw);
  const IntReg wide = __builtin_convertvector(raw, IntReg);
  const FloatReg size = bits<FloatReg>((wide & 0x7fff) << 13) * 0x1p112f;
  return bits<FloatReg>(bits<IntReg>(size) | ((wide & 0x8000) << 16));
}

// Round to the nearest integers, ties to even.
inline IntReg to_nearest(FloatReg value) {
  IntReg out;
  for (int i = 0; i < kRegLanes; i++) out[i] = int32_t(std::nearbyint(value[i]));
  return out;
}

inline IntReg byte_to_int_reg(const int8_t* from) {
  typedef int8_t Bytes __attribute__((vector_size(kRegLanes)));
  Bytes raw;
  std::memcpy(&raw, from, sizeof raw);
  return __builtin_convertvector(raw, IntReg);
}

// Widen bytes to 16 bits: two in each lane.
inline IntReg widen(const int8_t* from) {
  typedef int8_t Bytes __attribute__((vector_size(2 * kRegLanes)));
  typedef int16_t Shorts __attribute__((vector_size(4 * kRegLanes)));
  Bytes raw;
  std::memcpy(&raw, from, sizeof raw);
  return bits<IntReg>(__builtin_convertvector(raw, Shorts));
}

// Combine the upper half of the lanes with the lower half until one lane is left.
template <class Combine>
inline float reduce(FloatReg value, Combine combine) {
  float lanes[kRegLanes];
  store(lanes, value);
  for (int width = kRegLanes / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = combine(lanes[i], lanes[i + width]);
  return lanes[0];
}

// acc + w[even] x[even] + w[odd] x[odd], for a pair of bfloat16 in each lane.
template <class F, class I>
inline F dot_pairs(F acc, I w, I x) {
  const I upper = I{} + int32_t(0xffff0000);
  acc += bits<F>(w << 16) * bits<F>(x << 16);
  return acc + bits<F>(w & upper) * bits<F>(x & upper);
}

// acc + w x. With a fused instruction, it is named, so that the compiler cannot fuse in some places only.
template <class F>
inline F multiply_add(F acc, F w, F x) { return acc + w * x; }

// Return entries of a table of 16 bytes at the indices in `at`, which are bytes below 16.
inline IntReg look_up(const uint8_t* table, IntReg at) {
  uint8_t bytes[sizeof(IntReg)];
  store(bytes, at);
  for (uint8_t& byte : bytes) byte = table[byte];
  IntReg out;
  std::memcpy(&out, bytes, sizeof out);
  return out;
}

// Compute `value` before what follows. Compilers reorder products and sums, and may then keep some of them in memory.
template <class Reg>
inline void settle(Reg&) {}

// acc + the products of pairs of 16-bit integers.
template <class I>
inline I dot_shorts(I acc, I w, I x) { return acc + ((w << 16) >> 16) * ((x << 16) >> 16) + (w >> 16) * (x >> 16); }

// acc + the products of weights from `bytes_for` with input words.
template <class I>
inline I dot_bytes(I acc, I w, I x) { return dot_shorts(acc, w, x); }

// acc + the products of four weight bytes with four input bytes, in two 16-bit sums for each lane. Only for `kNarrowSums`.
template <class I>
inline I dot_narrow(I acc, I, I) { return acc; }

// acc + both 16-bit sums of each lane.
template <class I>
inline I add_narrow(I acc, I sums) { return acc + (sums << 16 >> 16) + (sums >> 16); }

}  // namespace outrider::plain
