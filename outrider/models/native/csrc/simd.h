// Arithmetic on vectors of sixteen lanes, on any processor that gcc or clang supports.
//
// Results must not depend on the number of rows in a pass. Every function here therefore has a fixed order of
// operations. Automatic vectorization would compute the tail of a loop in another order than its body.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#if defined(__SSE2__)
#include "simd_x86.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#include "simd_plain.h"
namespace outrider { using namespace plain; }
#endif

namespace outrider {

inline float to_float(uint16_t value) { return bits<float>(uint32_t(value) << 16); }
inline float to_float(float value) { return value; }

// Round to the nearest bfloat16, ties to even. A NaN stays a NaN.
inline uint16_t to_bfloat16(float value) {
  uint32_t raw = bits<uint32_t>(value);
  if ((raw & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return uint16_t((raw + 0x7fff + ((raw >> 16) & 1)) >> 16);
}

// Store a float as an element: rounded to bfloat16, or unchanged.
inline void set(uint16_t& to, float value) { to = to_bfloat16(value); }
inline void set(float& to, float value) { to = value; }

// The type of an input that is multiplied with a weight of type Element. For bfloat16 weights it is bfloat16. If the
// processor has no instruction that multiplies pairs of bfloat16, it is a float that is rounded to bfloat16.
struct RoundedFloat { float value; };
inline void set(RoundedFloat& to, float value) { to.value = to_float(to_bfloat16(value)); }
inline float to_float(RoundedFloat number) { return number.value; }
using InputBfloat16 = std::conditional_t<kBfloat16Pairs, uint16_t, RoundedFloat>;
template <class Element>
using Input = std::conditional_t<std::is_same_v<Element, uint16_t>, InputBfloat16, float>;
// The words of inputs that are multiplied with one word of weights: two if a pair of bfloat16 is multiplied as floats.
template <class Element>
constexpr int kParts = std::is_same_v<Element, uint16_t> ? sizeof(InputBfloat16) / 2 : 1;

// A weight that is a half float. It is multiplied as a float.
struct Half { uint16_t raw; };

inline FloatReg to_float_reg(const uint16_t* from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kRegLanes)));
  Halves raw;
  std::memcpy(&raw, from, sizeof raw);
  return bits<FloatReg>(__builtin_convertvector(raw, IntReg) << 16);
}

inline float half_to_float(uint16_t raw) {
  const float size = bits<float>(uint32_t(raw & 0x7fff) << 13) * 0x1p112f;
  return raw & 0x8000 ? -size : size;
}

// Return 2^(byte - 128) of each byte of an integer. Halving a power is exact, and gives the two smallest ones.
inline FloatReg power_of(IntReg byte) {
  const IntReg raw = byte << 23, least = IntReg{} + 0x400000;
  return bits<FloatReg>(raw < least ? least : raw) * 0.5f;
}

inline float power_of(uint8_t byte) { return bits<float>(byte ? uint32_t(byte) << 23 : 0x400000u) * 0.5f; }

// Round to bfloat16. A NaN stays a NaN.
inline FloatReg round_to_bfloat16(FloatReg value) {
  const IntReg raw = bits<IntReg>(value);
  const IntReg nan = IntReg{} + 0x7fc00000;
  const IntReg upper = (raw + 0x7fff + ((raw >> 16) & 1)) & ~0xffff;
  return bits<FloatReg>(value == value ? upper : nan);
}

// Round to the type of a number and store it. Return the rounded values as floats.
inline FloatReg store_rounded(uint16_t* to, FloatReg value) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kRegLanes)));
  const FloatReg rounded = round_to_bfloat16(value);
  store(to, __builtin_convertvector(bits<IntReg>(rounded) >> 16, Halves));
  return rounded;
}

inline FloatReg store_rounded(RoundedFloat* to, FloatReg value) {
  const FloatReg rounded = round_to_bfloat16(value);
  store(to, rounded);
  return rounded;
}

inline FloatReg store_rounded(float* to, FloatReg value) {
  store(to, value);
  return value;
}

// If a number is NaN, these return b.
template <class F>
inline F maximum(F a, F b) { return a > b ? a : b; }
template <class F>
inline F minimum(F a, F b) { return a < b ? a : b; }

// Return the larger one of two numbers that are not negative; NaN if one is NaN. As an integer, NaN is larger than all.
template <class F>
inline F maximum_or_nan(F a, F b) {
  using Integer = std::conditional_t<std::is_same_v<F, float>, int32_t, decltype(a > b)>;
  return bits<F>(maximum(bits<Integer>(a), bits<Integer>(b)));
}

#if !defined(__AVX512F__)
template <class Combine>
inline float reduce(Floats value, Combine combine) {
  FloatReg regs[kLanes / kRegLanes];
  std::memcpy(regs, &value, sizeof value);
  for (int width = kLanes / kRegLanes / 2; width; width /= 2)
    for (int i = 0; i < width; i++) regs[i] = combine(regs[i], regs[i + width]);
  return reduce(regs[0], combine);
}
#endif

inline float sum(Floats value) {
  return reduce(value, [](auto a, auto b) { return a + b; });
}

inline float largest(Floats value) {
  return reduce(value, [](auto a, auto b) { return maximum(a, b); });
}

// Round numbers to the nearest integers of a type, in units of the returned scale. The largest one gets the largest
// integer. The scale is not finite if a number is not. `count` is a multiple of kLanes.
template <class Integer>
inline float to_integers(const float* x, int count, Integer* out) {
  typedef Integer Integers __attribute__((vector_size(sizeof(Integer) * kRegLanes)));
  FloatReg sizes = {};
  for (int i = 0; i < count; i += kRegLanes)
    sizes = maximum_or_nan(sizes, bits<FloatReg>(bits<IntReg>(load_reg(x + i)) & 0x7fffffff));
  constexpr float most = std::numeric_limits<Integer>::max();
  const float size = reduce(sizes, [](auto a, auto b) { return maximum_or_nan(a, b); });
  const float inverse = size > 1e-30f ? most / size : 0;  // smaller numbers are 0
  for (int i = 0; i < count; i += kRegLanes)
    store(out + i, __builtin_convertvector(to_nearest(load_reg(x + i) * inverse), Integers));
  return size * (1 / most);
}

// Replace the numbers in N registers by e^x, accurate to about two units in the last place. Below -87.7 it is exactly 0, so
// masked scores get weight 0. Each step computes all registers, since the operations of one wait for each other.
template <int N>
inline void exponentials(FloatReg (&x)[N]) {
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float coefficients[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  FloatReg low = FloatReg{} - 88.0f;  // with an exponent of -127, which stands for 0
  FloatReg high = FloatReg{} + 88.0f;
  settle(low);  // a maximum with a constant would take two instructions
  settle(high);
  FloatReg exponent[N], poly[N];
  for (FloatReg& each : x) each = minimum(high, maximum(low, each));
  for (int i = 0; i < N; i++) exponent[i] = (x[i] * 1.44269504f + shift) - shift;
  for (int i = 0; i < N; i++) x[i] = x[i] - exponent[i] * 0.693359375f + exponent[i] * 2.12194440e-4f;
  for (FloatReg& each : poly) each = FloatReg{} + 1.9875691500e-4f;
  for (const float coefficient : coefficients)
    for (int i = 0; i < N; i++) poly[i] = poly[i] * x[i] + coefficient;
  for (int i = 0; i < N; i++) poly[i] = poly[i] * x[i] * x[i] + x[i] + 1.0f;
  for (int i = 0; i < N; i++) {
    const IntReg power = (__builtin_convertvector(exponent[i], IntReg) + 127) << 23;
    x[i] = poly[i] * bits<FloatReg>(power);
  }
}

template <class F>
inline F exponential(F x) {
  FloatReg regs[sizeof(F) / sizeof(FloatReg)];
  std::memcpy(regs, &x, sizeof x);
  exponentials(regs);
  std::memcpy(&x, regs, sizeof x);
  return x;
}

// cap tanh(x / cap), which is between -cap and cap.
template <class F>
inline F capped(F x, float cap) { return cap - 2 * cap / (1.0f + exponential(x * (2 / cap))); }

// acc + the products of the inputs in each word with weights: two of 16-bit integers, two of bfloat16, or one of float.
template <class Input, class F, class I>
inline F dot_words(F acc, I w, I x) {
  if constexpr (std::is_same_v<Input, int16_t>)
    return dot_shorts(acc, w, x);
  else if constexpr (sizeof(Input) == 2)
    return dot_pairs(acc, w, x);
  else
    return multiply_add(acc, bits<F>(w), bits<F>(x));
}

// Return the first or second bfloat16 of the pair in each lane, as float bits.
template <class I>
inline I half_of(I pair, int second) {
  return second ? pair & (I{} + int32_t(0xffff0000)) : pair << 16;
}

// Return whether values of `bits` bits are summed in 16-bit numbers.
constexpr bool sums_narrow(int bits) { return kNarrowSums && bits < 8; }

// Words that hold four neighboring bytes of an input row, for values of `bits` bits. One word if bytes are multiplied
// with bytes. Otherwise two words with two 16-bit numbers each: bytes 1 and 3, then bytes 2 and 4.
constexpr int byte_words(int bits) { return kByteProducts || sums_narrow(bits) ? 1 : 2; }

// Select, from four unsigned weight bytes in each lane, those that are multiplied with input word `word` of `words`.
template <int words, class I>
inline I bytes_for(I four, int word) {
  return words == 1 ? four : (word ? four >> 8 : four) & 0x00ff00ff;
}

}  // namespace outrider
