// Vectors of sixteen lanes, on any processor that gcc or clang supports.
//
// Results must not depend on the number of rows in a pass. Every function here therefore has a fixed order of
// operations. Automatic vectorization would compute the tail of a loop in another order than its body.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace outrider {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

// Lanes of one register. Compilers keep wider vectors in memory, which makes the innermost loops half as fast.
#if defined(__AVX512F__)
constexpr int kRegLanes = 16;
#elif defined(__AVX__)
constexpr int kRegLanes = 8;
#else
constexpr int kRegLanes = 4;
#endif
typedef float FloatReg __attribute__((vector_size(4 * kRegLanes)));
typedef int32_t IntReg __attribute__((vector_size(4 * kRegLanes)));

inline Floats load(const float* from) {
  Floats out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline IntReg load_reg(const int32_t* from) {
  IntReg out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline FloatReg load_reg(const float* from) {
  FloatReg out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

template <class To, class F>
inline void store(To* to, F value) { std::memcpy(to, &value, sizeof value); }

inline Floats broadcast(float value) { return Floats{} + value; }
inline Ints broadcast(int32_t value) { return Ints{} + value; }

// The numbers of the lanes.
inline Ints lanes() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

inline IntReg reg_lanes() {
  const Ints all = lanes();
  IntReg out;
  std::memcpy(&out, &all, sizeof out);
  return out;
}

template <class To, class From>
inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &value, sizeof out);
  return out;
}

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
#if defined(__AVX512BF16__)
typedef uint16_t InputBfloat16;
#else
struct InputBfloat16 { float value; };
inline void set(InputBfloat16& to, float value) { to.value = to_float(to_bfloat16(value)); }
#endif
template <class Element>
using Input = std::conditional_t<std::is_same_v<Element, uint16_t>, InputBfloat16, float>;

// A weight that is a half float. It is multiplied as a float.
struct Half { uint16_t raw; };

inline FloatReg to_float_reg(const uint16_t* from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kRegLanes)));
  Halves raw;
  std::memcpy(&raw, from, sizeof raw);
  return bits<FloatReg>(__builtin_convertvector(raw, IntReg) << 16);
}

// Half floats as floats. Multiplying by 2^112 moves their exponent, and is exact for all finite numbers.
inline FloatReg half_to_float_reg(const uint16_t* from) {
#if defined(__AVX512F__)
  return bits<FloatReg>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return bits<FloatReg>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kRegLanes)));
  Halves raw;
  std::memcpy(&raw, from, sizeof raw);
  const IntReg wide = __builtin_convertvector(raw, IntReg);
  const FloatReg size = bits<FloatReg>((wide & 0x7fff) << 13) * 0x1p112f;
  return bits<FloatReg>(bits<IntReg>(size) | ((wide & 0x8000) << 16));
#endif
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

// Round to the nearest integers, ties to even.
inline IntReg to_nearest(FloatReg value) {
#if defined(__AVX512F__)
  return bits<IntReg>(_mm512_cvtps_epi32(bits<__m512>(value)));
#elif defined(__AVX__)
  return bits<IntReg>(_mm256_cvtps_epi32(bits<__m256>(value)));
#elif defined(__SSE2__)
  return bits<IntReg>(_mm_cvtps_epi32(bits<__m128>(value)));
#else
  IntReg out;
  for (int i = 0; i < kRegLanes; i++) out[i] = int32_t(std::nearbyint(value[i]));
  return out;
#endif
}

inline IntReg byte_to_int_reg(const int8_t* from) {
#if defined(__AVX512F__)
  return bits<IntReg>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return bits<IntReg>(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kRegLanes)));
  Bytes raw;
  std::memcpy(&raw, from, sizeof raw);
  return __builtin_convertvector(raw, IntReg);
#endif
}

// Round to the elements of a register and store them. Return the rounded values as floats. A NaN stays a NaN.
inline FloatReg store_rounded(uint16_t* to, FloatReg value) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kRegLanes)));
  const IntReg raw = bits<IntReg>(value);
  const IntReg nan = IntReg{} + 0x7fc0;
  const IntReg upper = (raw + 0x7fff + ((raw >> 16) & 1)) >> 16;
  const IntReg half = value == value ? upper : nan;
  const Halves out = __builtin_convertvector(half, Halves);
  std::memcpy(to, &out, sizeof out);
  return bits<FloatReg>(half << 16);
}

inline FloatReg store_rounded(float* to, FloatReg value) {
  store(to, value);
  return value;
}

template <class F>
inline F maximum(F a, F b) { return a > b ? a : b; }

// Combine the upper half of the lanes with the lower half until one lane is left.
template <class Combine>
inline float reduce(Floats value, Combine combine) {
#if defined(__AVX512F__)
  for (int width = kLanes / 2; width; width /= 2) {
    const __m512i at = bits<__m512i>(lanes() + width);  // only the lower four bits count
    value = combine(value, bits<Floats>(_mm512_permutexvar_ps(at, bits<__m512>(value))));
  }
  return value[0];
#else
  float lanes[kLanes];
  store(lanes, value);
  int width = kLanes / 2;
  for (; width >= kRegLanes; width /= 2)
    for (int i = 0; i < width; i += kRegLanes)
      store(lanes + i, combine(load_reg(lanes + i), load_reg(lanes + i + width)));
  for (; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = combine(lanes[i], lanes[i + width]);
  return lanes[0];
#endif
}

inline float sum(Floats value) {
  return reduce(value, [](auto a, auto b) { return a + b; });
}

inline float largest(Floats value) {
  return reduce(value, [](auto a, auto b) { return maximum(a, b); });
}

// e^x, accurate to about two units in the last place. Exactly 0 below -87, so masked scores get weight 0.
inline FloatReg exponential(FloatReg x) {
  const FloatReg low = FloatReg{} - 87.0f;
  const FloatReg high = FloatReg{} + 88.0f;
  FloatReg clamped = x < low ? low : x;
  clamped = clamped > high ? high : clamped;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const FloatReg exponent = (clamped * 1.44269504f + shift) - shift;
  const FloatReg rest = clamped - exponent * 0.693359375f + exponent * 2.12194440e-4f;
  FloatReg poly = FloatReg{} + 1.9875691500e-4f;
  poly = poly * rest + 1.3981999507e-3f;
  poly = poly * rest + 8.3334519073e-3f;
  poly = poly * rest + 4.1665795894e-2f;
  poly = poly * rest + 1.6666665459e-1f;
  poly = poly * rest + 5.0000001201e-1f;
  poly = poly * rest * rest + rest + 1.0f;
  const IntReg power = (__builtin_convertvector(exponent, IntReg) + 127) << 23;
  const FloatReg out = poly * bits<FloatReg>(power);
  return x < low ? FloatReg{} : out;
}

#if !defined(__AVX512F__)
inline Floats exponential(Floats x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; i += kRegLanes) store(lanes + i, exponential(load_reg(lanes + i)));
  return load(lanes);
}
#endif

// cap tanh(x / cap), which is between -cap and cap.
template <class F>
inline F capped(F x, float cap) { return cap - 2 * cap / (1.0f + exponential(x * (2 / cap))); }

// acc + w[even] x[even] + w[odd] x[odd], for a pair of bfloat16 in each lane.
template <class F, class I>
inline F dot_pairs(F acc, I w, I x) {
#if defined(__AVX512BF16__)
  return bits<F>(_mm512_dpbf16_ps(bits<__m512>(acc), bits<__m512bh>(w), bits<__m512bh>(x)));
#else
  const I upper = I{} + int32_t(0xffff0000);
  acc += bits<F>(w << 16) * bits<F>(x << 16);
  return acc + bits<F>(w & upper) * bits<F>(x & upper);
#endif
}

// acc + w x. Uses the fused instruction explicitly, so that the compiler cannot fuse in some places only.
template <class F>
inline F multiply_add(F acc, F w, F x) {
#if defined(__AVX512F__)
  return bits<F>(_mm512_fmadd_ps(bits<__m512>(w), bits<__m512>(x), bits<__m512>(acc)));
#elif defined(__FMA__)
  return bits<F>(_mm256_fmadd_ps(bits<__m256>(w), bits<__m256>(x), bits<__m256>(acc)));
#elif defined(__aarch64__)
  return bits<F>(vfmaq_f32(bits<float32x4_t>(acc), bits<float32x4_t>(w), bits<float32x4_t>(x)));
#else
  return acc + w * x;
#endif
}

// acc + the products of the elements in each word: two of bfloat16, or one of float.
template <class Element, class F, class I>
inline F dot_words(F acc, I w, I x) {
  if constexpr (sizeof(Element) == 2)
    return dot_pairs(acc, w, x);
  else
    return multiply_add(acc, bits<F>(w), bits<F>(x));
}

// Return the first or second bfloat16 of the pair in each lane, as float bits.
template <class I>
inline I half_of(I pair, int second) {
  return second ? pair & (I{} + int32_t(0xffff0000)) : pair << 16;
}

// Whether an instruction multiplies four bytes with four bytes and adds to 32-bit sums.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool kByteProducts = true;
#else
constexpr bool kByteProducts = false;
#endif

// Whether, without such an instruction, products of values below 128 are summed in 16-bit numbers first.
#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)) || (defined(__SSSE3__) && !defined(__AVX__))
constexpr bool kNarrowSums = !kByteProducts;
#else
constexpr bool kNarrowSums = false;
#endif

// Return whether values of `bits` bits are summed in 16-bit numbers.
constexpr bool sums_narrow(int bits) { return kNarrowSums && bits < 8; }

// Words that hold four neighboring bytes of an input row, for values of `bits` bits. One word if bytes are multiplied
// with bytes. Otherwise two words with two 16-bit numbers each: bytes 1 and 3, then bytes 2 and 4.
constexpr int byte_words(int bits) { return kByteProducts || sums_narrow(bits) ? 1 : 2; }

// Return entries of a table of 16 bytes at the indices in `at`, which are bytes below 16.
inline IntReg look_up(const uint8_t* table, IntReg at) {
#if defined(__AVX512BW__)
  const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return bits<IntReg>(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(row), bits<__m512i>(at)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return bits<IntReg>(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(row), bits<__m256i>(at)));
#elif defined(__SSSE3__) && !defined(__AVX__)
  const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return bits<IntReg>(_mm_shuffle_epi8(row, bits<__m128i>(at)));
#else
  uint8_t bytes[sizeof(IntReg)];
  store(bytes, at);
  for (uint8_t& byte : bytes) byte = table[byte];
  IntReg out;
  std::memcpy(&out, bytes, sizeof out);
  return out;
#endif
}

// Compute `value` before what follows. Compilers reorder products and sums, and may then keep some of them in memory.
template <class Reg>
inline void settle([[maybe_unused]] Reg& value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#elif defined(__SSE2__)
  asm("" : "+x"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
}

// Select, from four unsigned weight bytes in each lane, those that are multiplied with input word `word` of `words`.
template <int words, class I>
inline I bytes_for(I four, int word) {
  return words == 1 ? four : (word ? four >> 8 : four) & 0x00ff00ff;
}

// acc + the products of weights from `bytes_for` with input words.
template <class I>
inline I dot_bytes(I acc, I w, I x) {
#if defined(__AVX512VNNI__)
  return bits<I>(_mm512_dpbusd_epi32(bits<__m512i>(acc), bits<__m512i>(w), bits<__m512i>(x)));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return bits<I>(_mm256_dpbusd_avx_epi32(bits<__m256i>(acc), bits<__m256i>(w), bits<__m256i>(x)));
#elif defined(__AVX512BW__)
  return acc + bits<I>(_mm512_madd_epi16(bits<__m512i>(w), bits<__m512i>(x)));
#elif defined(__AVX2__)
  return acc + bits<I>(_mm256_madd_epi16(bits<__m256i>(w), bits<__m256i>(x)));
#elif defined(__SSE2__) && !defined(__AVX__)
  return acc + bits<I>(_mm_madd_epi16(bits<__m128i>(w), bits<__m128i>(x)));
#else
  return acc + (w & 0xffff) * ((x << 16) >> 16) + (w >> 16) * (x >> 16);
#endif
}

// acc + the products of four weight bytes with four input bytes, in two 16-bit sums for each lane.
template <class I>
inline I dot_narrow(I acc, I w, I x) {
#if defined(__AVX512BW__)
  return bits<I>(_mm512_add_epi16(bits<__m512i>(acc), _mm512_maddubs_epi16(bits<__m512i>(w), bits<__m512i>(x))));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return bits<I>(_mm256_add_epi16(bits<__m256i>(acc), _mm256_maddubs_epi16(bits<__m256i>(w), bits<__m256i>(x))));
#elif defined(__SSSE3__) && !defined(__AVX__)
  return bits<I>(_mm_add_epi16(bits<__m128i>(acc), _mm_maddubs_epi16(bits<__m128i>(w), bits<__m128i>(x))));
#else
  return acc;  // not used: kNarrowSums is false
#endif
}

// acc + both 16-bit sums of each lane.
template <class I>
inline I add_narrow(I acc, I sums) {
#if defined(__AVX512BW__)
  return acc + bits<I>(_mm512_madd_epi16(bits<__m512i>(sums), _mm512_set1_epi16(1)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return acc + bits<I>(_mm256_madd_epi16(bits<__m256i>(sums), _mm256_set1_epi16(1)));
#else
  return acc + (sums << 16 >> 16) + (sums >> 16);
#endif
}

}  // namespace outrider
