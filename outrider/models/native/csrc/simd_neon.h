// The operations of `simd_plain.h` with the instructions of 64-bit ARM processors: NEON, and its extensions for dot
// products, matrices of bytes (i8mm) and bfloat16.
#pragma once

#include <arm_neon.h>

#include "simd_plain.h"

namespace outrider {

using plain::byte_to_int_reg;
using plain::widen;
using plain::reduce;
using plain::kNarrowSums;
using plain::dot_narrow;
using plain::add_narrow;

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kBfloat16Pairs = true;
#else
constexpr bool kBfloat16Pairs = false;
#endif

constexpr bool kByteProducts = true;
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kSignedBytes = false;
#else
constexpr bool kSignedBytes = true;
#endif

inline FloatReg half_to_float_reg(const uint16_t* from) {
  return bits<FloatReg>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))));
}

inline IntReg to_nearest(FloatReg value) { return bits<IntReg>(vcvtnq_s32_f32(bits<float32x4_t>(value))); }

template <class F, class I>
inline F dot_pairs(F acc, I w, I x) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return bits<F>(vbfdotq_f32(bits<float32x4_t>(acc), bits<bfloat16x8_t>(w), bits<bfloat16x8_t>(x)));
#else
  return plain::dot_pairs(acc, w, x);
#endif
}

template <class F>
inline F multiply_add(F acc, F w, F x) {
  return bits<F>(vfmaq_f32(bits<float32x4_t>(acc), bits<float32x4_t>(w), bits<float32x4_t>(x)));
}

inline IntReg look_up(const uint8_t* table, IntReg at) {
  return bits<IntReg>(vqtbl1q_u8(vld1q_u8(table), bits<uint8x16_t>(at)));
}

template <class Reg>
inline void settle(Reg& value) { asm("" : "+w"(value)); }

template <class I>
inline I dot_shorts(I acc, I w, I x) {
  const int16x8_t weights = bits<int16x8_t>(w), inputs = bits<int16x8_t>(x);
  const int32x4_t first = vmull_s16(vget_low_s16(weights), vget_low_s16(inputs));
  return acc + bits<I>(vpaddq_s32(first, vmull_high_s16(weights, inputs)));
}

template <class I>
inline I dot_bytes(I acc, I w, I x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return bits<I>(vusdotq_s32(bits<int32x4_t>(acc), bits<uint8x16_t>(w), bits<int8x16_t>(x)));
#elif defined(__ARM_FEATURE_DOTPROD)
  return bits<I>(vdotq_s32(bits<int32x4_t>(acc), bits<int8x16_t>(w), bits<int8x16_t>(x)));
#else
  // Two products of bytes of which one is not -128 fit into 16 bits. Inputs are at least -127.
  const int8x16_t weights = bits<int8x16_t>(w), inputs = bits<int8x16_t>(x);
  const int16x8_t first = vmull_s8(vget_low_s8(weights), vget_low_s8(inputs));
  return bits<I>(vpadalq_s16(bits<int32x4_t>(acc), vpaddq_s16(first, vmull_high_s8(weights, inputs))));
#endif
}

}  // namespace outrider
