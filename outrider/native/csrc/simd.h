// Sixteen lanes of float, on any machine that gcc or clang know.
//
// Results must not depend on how many rows a pass has, so everything here has one order of operations, and nothing is
// left to a vectoriser that would treat a loop's tail otherwise than its body.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace outrider {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

// What a register holds. Compilers keep what is wider in memory, which in the innermost loops takes twice the time.
#if defined(__AVX512F__)
constexpr int kPart = 16;
#elif defined(__AVX__)
constexpr int kPart = 8;
#else
constexpr int kPart = 4;
#endif
typedef float FloatPart __attribute__((vector_size(4 * kPart)));
typedef int32_t IntPart __attribute__((vector_size(4 * kPart)));

inline Floats load(const float* from) {
  Floats out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline IntPart load_part(const int32_t* from) {
  IntPart out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline FloatPart load_part(const float* from) {
  FloatPart out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

template <class F>
inline void store(float* to, F value) { std::memcpy(to, &value, sizeof value); }

inline Floats fill(float value) { return Floats{} + value; }
inline Ints fill(int32_t value) { return Ints{} + value; }

inline Ints lanes() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

template <class To, class From>
inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &value, sizeof out);
  return out;
}

inline float widen(uint16_t value) { return bits<float>(uint32_t(value) << 16); }
inline float widen(float value) { return value; }

// Round to the nearest bfloat16, ties to even. A NaN stays one.
inline uint16_t narrow(float value) {
  uint32_t raw = bits<uint32_t>(value);
  if ((raw & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return uint16_t((raw + 0x7fff + ((raw >> 16) & 1)) >> 16);
}

// As an element holds it: bfloat16, or float itself.
inline void set(uint16_t& to, float value) { to = narrow(value); }
inline void set(float& to, float value) { to = value; }

// What meets an element of a matrix: the same, and where no instruction multiplies pairs of bfloat16, a float rounded to it.
#if defined(__AVX512BF16__)
typedef uint16_t Partner;
#else
struct Partner { float value; };
inline void set(Partner& to, float value) { to.value = widen(narrow(value)); }
#endif
template <class Element>
using Facing = std::conditional_t<sizeof(Element) == 2, Partner, float>;

inline FloatPart widen_part(const uint16_t* from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kPart)));
  Halves raw;
  std::memcpy(&raw, from, sizeof raw);
  return bits<FloatPart>(__builtin_convertvector(raw, IntPart) << 16);
}

// Round to sixteen elements, a NaN staying one; returns what they stand for.
inline Floats round_to(uint16_t* to, Floats value) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  const Ints raw = bits<Ints>(value), nan = fill(0x7fc0);
  const Ints upper = (raw + 0x7fff + ((raw >> 16) & 1)) >> 16;
  const Ints half = value == value ? upper : nan;
  const Halves out = __builtin_convertvector(half, Halves);
  std::memcpy(to, &out, sizeof out);
  return bits<Floats>(half << 16);
}

inline Floats round_to(float* to, Floats value) {
  store(to, value);
  return value;
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// Lane i is a[at[i]], or b[at[i] - 16].
inline Ints pick(Ints a, Ints b, Ints at) {
#if defined(__AVX512F__)
  return bits<Ints>(_mm512_permutex2var_epi32(bits<__m512i>(a), bits<__m512i>(at), bits<__m512i>(b)));
#else
  Ints out;
  for (int i = 0; i < kLanes; i++) out[i] = at[i] < kLanes ? a[at[i]] : b[at[i] - kLanes];
  return out;
#endif
}

// Fold the upper half onto the lower one, until one lane is left.
template <class Combine>
inline float fold(Floats value, Combine combine) {
  for (int width = kLanes / 2; width; width /= 2) {
    const Ints raw = bits<Ints>(value);
    value = combine(value, bits<Floats>(pick(raw, raw, lanes() + width)));
  }
  return value[0];
}

inline float sum(Floats value) {
  return fold(value, [](Floats a, Floats b) { return a + b; });
}

inline float largest(Floats value) { return fold(value, maximum); }

// e^x, to about two units in the last place; exactly 0 below -87, which is how what is masked vanishes.
inline Floats exponential(Floats x) {
  Floats low = fill(-87.0f), high = fill(88.0f);
  Floats inside = x < low ? low : x;
  inside = inside > high ? high : inside;
  Floats shift = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats whole = (inside * 1.44269504f + shift) - shift;
  Floats rest = inside - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats poly = fill(1.9875691500e-4f);
  poly = poly * rest + 1.3981999507e-3f;
  poly = poly * rest + 8.3334519073e-3f;
  poly = poly * rest + 4.1665795894e-2f;
  poly = poly * rest + 1.6666665459e-1f;
  poly = poly * rest + 5.0000001201e-1f;
  poly = poly * rest * rest + rest + 1.0f;
  Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
  Floats out = poly * bits<Floats>(power);
  return x < low ? Floats{} : out;
}

// acc + w[even] x[even] + w[odd] x[odd], for pairs of bfloat16 in each lane.
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

// acc + w x; said outright where the machine does it in one step, so that no compiler does so here and not there.
template <class F>
inline F multiply_add(F acc, F w, F x) {
#if defined(__AVX512F__)
  return bits<F>(_mm512_fmadd_ps(bits<__m512>(w), bits<__m512>(x), bits<__m512>(acc)));
#else
  return acc + w * x;
#endif
}

// acc + the products of what a word holds: two of bfloat16, or one of float.
template <class Element, class F, class I>
inline F dot_words(F acc, I w, I x) {
  if constexpr (sizeof(Element) == 2)
    return dot_pairs(acc, w, x);
  else
    return multiply_add(acc, bits<F>(w), bits<F>(x));
}

// The first or second of the pair of bfloat16 in each lane, as float.
template <class I>
inline I half_of(I pair, int second) {
  return second ? pair & (I{} + int32_t(0xffff0000)) : pair << 16;
}

// Words in which four neighbouring bytes of a row lie: one where an instruction multiplies four of them with four of a
// matrix, else two, of the first and third and of the second and fourth, as 16 bits each.
#if defined(__AVX512VNNI__)
constexpr int kByteWords = 1;
#else
constexpr int kByteWords = 2;
#endif

// Of four unsigned bytes in each lane those that meet such a word.
template <class I>
inline I bytes_for(I four, int word) {
  return kByteWords == 1 ? four : (word ? four >> 8 : four) & 0x00ff00ff;
}

// acc + the products of what `bytes_for` left with such words.
template <class I>
inline I dot_bytes(I acc, I w, I x) {
#if defined(__AVX512VNNI__)
  return bits<I>(_mm512_dpbusd_epi32(bits<__m512i>(acc), bits<__m512i>(w), bits<__m512i>(x)));
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

}  // namespace outrider
