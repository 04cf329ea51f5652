// The operations of `simd_plain.h` with the instructions of x86 processors, from SSE2 to AVX-512.
#pragma once

#include <immintrin.h>

#include "simd_plain.h"

namespace outrider {

#if defined(__AVX512BF16__)
constexpr bool kBfloat16Pairs = true;
#else
constexpr bool kBfloat16Pairs = false;
#endif

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool kByteProducts = true;
#else
constexpr bool kByteProducts = false;
#endif

constexpr bool kSignedBytes = false;

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)) || (defined(__SSSE3__) && !defined(__AVX__))
constexpr bool kNarrowSums = !kByteProducts;
#else
constexpr bool kNarrowSums = false;
#endif

inline FloatReg half_to_float_reg(const uint16_t* from) {
#if defined(__AVX512F__)
  return bits<FloatReg>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return bits<FloatReg>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  return plain::half_to_float_reg(from);
#endif
}

inline IntReg to_nearest(FloatReg value) {
#if defined(__AVX512F__)
  return bits<IntReg>(_mm512_cvtps_epi32(bits<__m512>(value)));
#elif defined(__AVX__)
  return bits<IntReg>(_mm256_cvtps_epi32(bits<__m256>(value)));
#else
  return bits<IntReg>(_mm_cvtps_epi32(bits<__m128>(value)));
#endif
}

inline IntReg byte_to_int_reg(const int8_t* from) {
#if defined(__AVX512F__)
  return bits<IntReg>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return bits<IntReg>(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)));
#else
  return plain::byte_to_int_reg(from);
#endif
}

inline IntReg widen(const int8_t* from) {
#if defined(__AVX512BW__)
  return bits<IntReg>(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return bits<IntReg>(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  return plain::widen(from);
#endif
}

template <class Combine>
inline float reduce(FloatReg value, Combine combine) {
#if defined(__AVX2__)
  for (int width = kRegLanes / 2; width; width /= 2) {
    const IntReg at = reg_lanes() + width;  // only the lower bits count
#if defined(__AVX512F__)
    const auto upper = _mm512_permutexvar_ps(bits<__m512i>(at), bits<__m512>(value));
#else
    const auto upper = _mm256_permutevar8x32_ps(bits<__m256>(value), bits<__m256i>(at));
#endif
    value = combine(value, bits<FloatReg>(upper));
  }
  return value[0];
#else
  return plain::reduce(value, combine);
#endif
}

template <class F, class I>
inline F dot_pairs(F acc, I w, I x) {
#if defined(__AVX512BF16__)
  return bits<F>(_mm512_dpbf16_ps(bits<__m512>(acc), bits<__m512bh>(w), bits<__m512bh>(x)));
#else
  return plain::dot_pairs(acc, w, x);
#endif
}

template <class F>
inline F multiply_add(F acc, F w, F x) {
#if defined(__AVX512F__)
  return bits<F>(_mm512_fmadd_ps(bits<__m512>(w), bits<__m512>(x), bits<__m512>(acc)));
#elif defined(__FMA__)
  return bits<F>(_mm256_fmadd_ps(bits<__m256>(w), bits<__m256>(x), bits<__m256>(acc)));
#else
  return plain::multiply_add(acc, w, x);
#endif
}

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
  return plain::look_up(table, at);
#endif
}

template <class Reg>
inline void settle(Reg& value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#else
  asm("" : "+x"(value));
#endif
}

template <class I>
inline I dot_shorts(I acc, I w, I x) {
#if defined(__AVX512VNNI__)
  return bits<I>(_mm512_dpwssd_epi32(bits<__m512i>(acc), bits<__m512i>(w), bits<__m512i>(x)));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return bits<I>(_mm256_dpwssd_avx_epi32(bits<__m256i>(acc), bits<__m256i>(w), bits<__m256i>(x)));
#elif defined(__AVX512BW__)
  return acc + bits<I>(_mm512_madd_epi16(bits<__m512i>(w), bits<__m512i>(x)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return acc + bits<I>(_mm256_madd_epi16(bits<__m256i>(w), bits<__m256i>(x)));
#elif defined(__SSE2__) && !defined(__AVX__)
  return acc + bits<I>(_mm_madd_epi16(bits<__m128i>(w), bits<__m128i>(x)));
#else
  return plain::dot_shorts(acc, w, x);
#endif
}

template <class I>
inline I dot_bytes(I acc, I w, I x) {
#if defined(__AVX512VNNI__)
  return bits<I>(_mm512_dpbusd_epi32(bits<__m512i>(acc), bits<__m512i>(w), bits<__m512i>(x)));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return bits<I>(_mm256_dpbusd_avx_epi32(bits<__m256i>(acc), bits<__m256i>(w), bits<__m256i>(x)));
#else
  return dot_shorts(acc, w, x);
#endif
}

template <class I>
inline I dot_narrow(I acc, I w, I x) {
#if defined(__AVX512BW__)
  return bits<I>(_mm512_add_epi16(bits<__m512i>(acc), _mm512_maddubs_epi16(bits<__m512i>(w), bits<__m512i>(x))));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return bits<I>(_mm256_add_epi16(bits<__m256i>(acc), _mm256_maddubs_epi16(bits<__m256i>(w), bits<__m256i>(x))));
#elif defined(__SSSE3__) && !defined(__AVX__)
  return bits<I>(_mm_add_epi16(bits<__m128i>(acc), _mm_maddubs_epi16(bits<__m128i>(w), bits<__m128i>(x))));
#else
  return plain::dot_narrow(acc, w, x);
#endif
}

template <class I>
inline I add_narrow(I acc, I sums) {
#if defined(__AVX512BW__)
  return acc + bits<I>(_mm512_madd_epi16(bits<__m512i>(sums), _mm512_set1_epi16(1)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return acc + bits<I>(_mm256_madd_epi16(bits<__m256i>(sums), _mm256_set1_epi16(1)));
#else
  return plain::add_narrow(acc, sums);
#endif
}

}  // namespace outrider
