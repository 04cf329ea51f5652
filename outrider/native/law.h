// Laws over a vocabulary: made from logits, and drawn from.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace outrider {

inline double total(const float* mass, int size) {
  double sums[8] = {};
  int v = 0;
  for (; v + 8 <= size; v += 8)
    for (int lane = 0; lane < 8; lane++) sums[lane] += mass[v + lane];
  for (; v < size; v++) sums[0] += mass[v];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// softmax(x / temperature), in place.
inline void soften(float* x, int size, float temperature) {
  const auto each = [&](auto work) {
    int v = 0;
    for (; v + kLanes <= size; v += kLanes) store(x + v, work(load(x + v)));
    float rest[kLanes];
    std::fill(rest, rest + kLanes, -INFINITY);
    std::copy(x + v, x + size, rest);
    store(rest, work(load(rest)));
    std::copy(rest, rest + (size - v), x + v);
  };
  Floats most = fill(-INFINITY);
  each([&](Floats y) { return y /= temperature, most = maximum(most, y), y; });
  const float peak = largest(most);
  each([&](Floats y) { return exponential(y - peak); });
  const float whole = float(total(x, size));
  each([&](Floats y) { return y / whole; });
}

// The first id whose cumulative mass exceeds u times the total, where masses are added one by one.
inline int64_t draw_plainly(const float* mass, int size, double u) {
  double whole = 0, sum = 0;
  for (int v = 0; v < size; v++) whole += mass[v];
  const double bar = u * whole;
  for (int v = 0; v < size; v++)
    if ((sum += mass[v]) > bar) return v;
  return size - 1;
}

// The same, and much sooner: sums one by one wait for each other. Sums in blocks round otherwise, by less than `doubt`,
// and so they decide wherever the bar is not as close as that to where the id would be another.
inline int64_t draw(const float* mass, int size, double u) {
  constexpr int kBlock = 512;
  thread_local std::vector<double> sums;
  sums.clear();
  double whole = 0, below = 0;
  for (int v = 0; v < size; v += kBlock) whole += sums.emplace_back(total(mass + v, std::min(kBlock, size - v)));
  const double bar = u * whole, doubt = 1e-15 * size * whole;
  size_t block = 0;
  while (block < sums.size() && below + sums[block] <= bar) below += sums[block++];
  const int begin = int(block) * kBlock, end = std::min(begin + kBlock, size);
  for (int v = begin; v < end; v++) {
    const double here = below + mass[v];
    if (here > bar) return bar - below > doubt && here - bar > doubt ? v : draw_plainly(mass, size, u);
    below = here;
  }
  return draw_plainly(mass, size, u);
}

}  // namespace outrider
