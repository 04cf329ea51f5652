// Probability distributions over a vocabulary: compute them from logits, and sample from them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "simd.h"

namespace outrider {

// The random numbers of core/noise.py.
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

inline double to_uniform(uint64_t bits) { return double((bits >> 16) & 0xFFFFFFFFFFFFULL) * 0x1p-48; }

inline double total(const float* mass, int size) {
  double sums[8] = {};
  int v = 0;
  for (; v + 8 <= size; v += 8)
    for (int lane = 0; lane < 8; lane++) sums[lane] += mass[v + lane];
  for (; v < size; v++) sums[0] += mass[v];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The sampling parameters of a request: `DrawParams` of core/draws.py.
struct SamplingParams {
  float temperature;  // 0: the likeliest id
  float top_k;        // the vocabulary size or more: off
  float top_p, min_p;
};

// Compute softmax(x / temperature) in place.
inline void softmax(float* x, int size, float temperature) {
  const auto transform = [&](auto function) {
    int v = 0;
    for (; v + kLanes <= size; v += kLanes) store(x + v, function(load(x + v)));
    float rest[kLanes];
    std::fill(rest, rest + kLanes, -INFINITY);
    std::copy(x + v, x + size, rest);
    store(rest, function(load(rest)));
    std::copy(rest, rest + (size - v), x + v);
  };
  Floats max = broadcast(-INFINITY);
  transform([&](Floats y) { return y /= temperature, max = maximum(max, y), y; });
  const float peak = largest(max);
  transform([&](Floats y) { return exponential(y - peak); });
  const float sum = float(total(x, size));
  transform([&](Floats y) { return y / sum; });
}

inline float kth_largest(const float* x, int size, int k) {
  thread_local std::vector<float> candidates;
  candidates.clear();
  const auto select_kth = [&] {
    std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), std::greater<float>());
    return candidates[k - 1];
  };
  // The k-th largest of the block maxima is a lower bound. Few values exceed it.
  float lower_bound = -INFINITY;
  if (k <= size / kLanes) {
    for (int v = 0; v + kLanes <= size; v += kLanes) candidates.push_back(largest(load(x + v)));
    lower_bound = select_kth();
    candidates.clear();
  }
  for (int v = 0; v < size; v++)
    if (x[v] >= lower_bound) candidates.push_back(x[v]);
  return select_kth();
}

// Keep the likeliest ids such that the mass before each of them is below top_p, and renormalize. `mass` sums to 1.
inline void keep_nucleus(float* mass, int size, float top_p) {
  thread_local std::vector<std::pair<float, int>> candidates;
  candidates.clear();
  // All ids with less mass than this have less than 1 - top_p together, so none of them is in the nucleus.
  const float min_mass = std::max((1 - top_p) / float(size), 1e-30f);
  for (int v = 0; v < size; v++)
    if (mass[v] >= min_mass) candidates.emplace_back(-mass[v], v);
  std::sort(candidates.begin(), candidates.end());
  double kept_mass = 0;
  size_t kept = 0;
  while (kept < candidates.size() && (!kept || kept_mass < top_p)) kept_mass -= candidates[kept++].first;
  std::fill(mass, mass + size, 0.0f);
  for (size_t i = 0; i < kept; i++) mass[candidates[i].second] = float(-candidates[i].first / kept_mass);
}

inline void normalize(float* mass, int size) {
  const float sum = float(total(mass, size));
  for (int v = 0; v < size; v++) mass[v] /= sum;
}

// Return the first id with the largest logit; -1 if a logit is NaN or the largest is infinite.
inline int32_t likeliest(const float* logits, int vocab) {
  Floats max = broadcast(-INFINITY);
  Ints nan_lanes = {};
  int i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    const Floats x = load(logits + i);
    nan_lanes |= x != x;
    max = maximum(max, x);
  }
  float best = largest(max);
  bool has_nan = largest(__builtin_convertvector(nan_lanes & 1, Floats)) > 0;
  for (; i < vocab; i++) {
    has_nan |= logits[i] != logits[i];
    best = std::max(best, logits[i]);
  }
  if (has_nan || std::isinf(best)) return -1;
  for (i = 0; logits[i] != best; i++) {
  }
  return i;
}

// Turn logits into the distribution that tokens are sampled from, in place. If a logit is NaN, it is one-hot at id 0.
inline void apply_sampling(float* x, int size, const SamplingParams& params) {
  int best = likeliest(x, size);
  if (best < 0 || params.temperature == 0) {
    const bool has_nan = best < 0 && std::any_of(x, x + size, [](float y) { return y != y; });
    if (best < 0) best = has_nan ? 0 : int(std::max_element(x, x + size) - x);
    std::fill(x, x + size, 0.0f);
    x[best] = 1;
    return;
  }
  if (params.top_k < float(size)) {
    const float min_logit = kth_largest(x, size, int(params.top_k));
    for (int v = 0; v < size; v++)
      if (x[v] < min_logit) x[v] = -INFINITY;
  }
  softmax(x, size, params.temperature);
  if (params.top_p < 1) keep_nucleus(x, size, params.top_p);
  if (params.min_p > 0) {
    const float min_mass = params.min_p * *std::max_element(x, x + size);
    for (int v = 0; v < size; v++)
      if (x[v] < min_mass) x[v] = 0;
    normalize(x, size);
  }
}

// Return the first id whose cumulative mass exceeds u times the total. Masses are added one by one.
inline int64_t sample_in_order(const float* mass, int size, double u) {
  double whole = 0, sum = 0;
  for (int v = 0; v < size; v++) whole += mass[v];
  const double threshold = u * whole;
  for (int v = 0; v < size; v++)
    if ((sum += mass[v]) > threshold) return v;
  return size - 1;
}

// Return the same id as `sample_in_order`, but much faster. It adds masses in blocks, because each sum of a sequential
// addition waits for the one before. The rounding then differs by less than `tolerance`. If the threshold is that close
// to another id, the function falls back to `sample_in_order`.
inline int64_t sample(const float* mass, int size, double u) {
  constexpr int kBlock = 512;
  thread_local std::vector<double> sums;
  sums.clear();
  double whole = 0, below = 0;
  for (int v = 0; v < size; v += kBlock) whole += sums.emplace_back(total(mass + v, std::min(kBlock, size - v)));
  const double threshold = u * whole;
  const double tolerance = 1e-15 * size * whole;
  size_t block = 0;
  while (block < sums.size() && below + sums[block] <= threshold) below += sums[block++];
  const int begin = int(block) * kBlock;
  const int end = std::min(begin + kBlock, size);
  for (int v = begin; v < end; v++) {
    const double cumulative = below + mass[v];
    if (cumulative > threshold) {
      const bool certain = threshold - below > tolerance && cumulative - threshold > tolerance;
      return certain ? v : sample_in_order(mass, size, u);
    }
    below = cumulative;
  }
  return sample_in_order(mass, size, u);
}

// Sample an id by an exponential race: the smallest -log(1 - u) / p wins. It is at least u / p, so most ids lose without
// computing a logarithm.
inline int64_t sample_race(const float* mass, int size, uint64_t key) {
  double smallest = INFINITY;
  int64_t winner = 0;
  for (int v = 0; v < size; v++) {
    const double prob = mass[v];
    if (!(prob > 0)) continue;
    const double uniform = to_uniform(mix(key + uint64_t(v) * kGolden));
    if (uniform > smallest * prob * (1 + 1e-9)) continue;
    const double arrival = -std::log1p(-uniform) / prob;
    if (arrival < smallest) {
      smallest = arrival;
      winner = v;
    }
  }
  return winner;
}

}  // namespace outrider
