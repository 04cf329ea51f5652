// What the tests of the kernels share: random numbers, memory, and checks that print what failed.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace outrider::test {

inline int& failures() {
  static int count = 0;
  return count;
}

inline void check(bool passed, const std::string& what) {
  if (passed) return;
  failures()++;
  std::printf("FAILED: %s\n", what.c_str());
}

// Return whether all values are within `tolerance` times their scale of the right ones.
inline bool close(const std::vector<float>& values, const std::vector<double>& right, const std::vector<double>& scale,
                  double tolerance) {
  for (size_t i = 0; i < values.size(); i++)
    if (!(std::abs(values[i] - right[i]) <= tolerance * scale[i] + 1e-30)) return false;
  return true;
}

// The tests. The last one takes a file of `write_models.py`.
void check_products();
void check_attention();
void check_models(const char* path);

inline bool same_bits(const float* a, const float* b, size_t count) { return !std::memcmp(a, b, count * sizeof(float)); }

// The same random numbers on every machine.
class Random {
 public:
  uint32_t bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state_ >> 33);
  }
  int below(int size) { return int(bits() % uint32_t(size)); }
  float uniform() { return float(bits() & 0xffffff) * 0x1p-23f - 1; }  // -1 .. 1
  void fill(std::vector<float>& values) {
    for (float& value : values) value = uniform();
  }
  void fill_bytes(void* memory, size_t size) {
    for (size_t i = 0; i < size; i++) static_cast<uint8_t*>(memory)[i] = uint8_t(bits());
  }

 private:
  uint64_t state_ = 1;
};

}  // namespace outrider::test
