// Laws over a vocabulary: made from logits, and drawn from.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
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

// How a request wants its tokens drawn; `sampling.py` says what each means.
struct Taste {
  float temperature;  // 0: the likeliest id
  float top_k;        // the vocabulary's size or more: off
  float top_p, min_p;
};

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

inline float kth_largest(const float* x, int size, int k) {
  thread_local std::vector<float> some;
  some.clear();
  const auto kth = [&] {
    std::nth_element(some.begin(), some.begin() + (k - 1), some.end(), std::greater<float>());
    return some[k - 1];
  };
  float least = -INFINITY;  // of k blocks the largest are k candidates, and few others lie above the least of them
  if (k <= size / kLanes) {
    for (int v = 0; v + kLanes <= size; v += kLanes) some.push_back(largest(load(x + v)));
    least = kth();
    some.clear();
  }
  for (int v = 0; v < size; v++)
    if (x[v] >= least) some.push_back(x[v]);
  return kth();
}

// Leave the likeliest ids whose mass before them is below top_p. `mass` sums to 1.
inline void keep_nucleus(float* mass, int size, float top_p) {
  thread_local std::vector<std::pair<float, int>> some;
  some.clear();
  // All ids below this together have less than 1 - top_p, so none of them is needed.
  const float least = std::max((1 - top_p) / float(size), 1e-30f);
  for (int v = 0; v < size; v++)
    if (mass[v] >= least) some.emplace_back(-mass[v], v);
  std::sort(some.begin(), some.end());
  double before = 0;
  size_t kept = 0;
  while (kept < some.size() && (!kept || before < top_p)) before -= some[kept++].first;
  std::fill(mass, mass + size, 0.0f);
  for (size_t i = 0; i < kept; i++) mass[some[i].second] = float(-some[i].first / before);
}

inline void scale(float* mass, int size) {
  const float whole = float(total(mass, size));
  for (int v = 0; v < size; v++) mass[v] /= whole;
}

// The first of the largest; -1 if something is not a number, or none is finite.
inline int32_t likeliest(const float* logits, int vocab) {
  Floats most = fill(-INFINITY);
  Ints odd = {};
  int i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    const Floats x = load(logits + i);
    odd |= x != x;
    most = maximum(most, x);
  }
  float best = largest(most);
  bool bad = largest(__builtin_convertvector(odd & 1, Floats)) > 0;
  for (; i < vocab; i++) {
    bad |= logits[i] != logits[i];
    best = std::max(best, logits[i]);
  }
  if (bad || std::isinf(best)) return -1;
  for (i = 0; logits[i] != best; i++) {
  }
  return i;
}

// From logits to the law that is sampled, in place. Where logits are no numbers the law is that of the first id.
inline void shape(float* x, int size, const Taste& want) {
  int best = likeliest(x, size);
  if (best < 0 || want.temperature == 0) {
    const bool odd = best < 0 && std::any_of(x, x + size, [](float y) { return y != y; });
    if (best < 0) best = odd ? 0 : int(std::max_element(x, x + size) - x);
    std::fill(x, x + size, 0.0f);
    x[best] = 1;
    return;
  }
  if (want.top_k < float(size)) {
    const float least = kth_largest(x, size, int(want.top_k));
    for (int v = 0; v < size; v++)
      if (x[v] < least) x[v] = -INFINITY;
  }
  soften(x, size, want.temperature);
  if (want.top_p < 1) keep_nucleus(x, size, want.top_p);
  if (want.min_p > 0) {
    const float least = want.min_p * *std::max_element(x, x + size);
    for (int v = 0; v < size; v++)
      if (x[v] < least) x[v] = 0;
    scale(x, size);
  }
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
