// Vectors of sixteen lanes, and registers of as many lanes as a processor has, in the vector types of gcc and clang.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace outrider {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(4 * kLanes)));

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

// The numbers of the lanes.
inline IntReg reg_lanes() {
  constexpr int32_t all[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  IntReg out;
  std::memcpy(&out, all, sizeof out);
  return out;
}

// The number of parts of `size` items that are as equal as possible, with at most `most` items each, and where one begins.
inline int parts(int size, int most) { return (size + most - 1) / most; }
inline int part_begin(int size, int parts, int part) { return size / parts * part + std::min(part, size % parts); }

template <class To, class From>
inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &value, sizeof out);
  return out;
}

}  // namespace outrider
