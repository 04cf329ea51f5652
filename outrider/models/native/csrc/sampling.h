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

// Replace each number by a function of it, a register at a time.
template <class Function>
inline void transform(float* x, int size, Function function) {
  int v = 0;
  for (; v + kRegLanes <= size; v += kRegLanes) store(x + v, function(load_reg(x + v)));
  if (v == size) return;
  float rest[kRegLanes] = {};
  std::copy(x + v, x + size, rest);
  store(rest, function(load_reg(rest)));
  std::copy(rest, rest + (size - v), x + v);
}

// Call a function with each id whose number is at least `limit`, in order. Few are, so most blocks are passed over.
template <class Function>
inline void for_each_at_least(const float* x, int size, float limit, Function function) {
  constexpr int kBlock = 4 * kRegLanes;
  int v = 0;
  for (; v + kBlock <= size; v += kBlock) {
    FloatReg most = load_reg(x + v);
    for (int i = kRegLanes; i < kBlock; i += kRegLanes) most = maximum(most, load_reg(x + v + i));
    if (reduce(most, [](auto a, auto b) { return maximum(a, b); }) < limit) continue;
    for (int i = v; i < v + kBlock; i++)
      if (x[i] >= limit) function(i);
  }
  for (; v < size; v++)
    if (x[v] >= limit) function(v);
}

// Return the largest logit; NaN if a logit is NaN.
inline float peak(const float* logits, int size) {
  FloatReg max = FloatReg{} - INFINITY;
  IntReg nan_lanes = {};
  int v = 0;
  for (; v + kRegLanes <= size; v += kRegLanes) {
    const FloatReg x = load_reg(logits + v);
    nan_lanes |= x != x;
    max = maximum(max, x);
  }
  float out = reduce(max, [](auto a, auto b) { return maximum(a, b); });
  float nans = reduce(__builtin_convertvector(nan_lanes & 1, FloatReg), [](auto a, auto b) { return a + b; });
  for (; v < size; v++) {
    nans += logits[v] != logits[v];
    out = std::max(out, logits[v]);
  }
  return nans > 0 ? NAN : out;
}

// Compute softmax(x / temperature) in place. `peak` is the largest logit.
inline void softmax(float* x, int size, float temperature, float peak) {
  const float most = peak / temperature;
  transform(x, size, [=](FloatReg y) { return exponential(y / temperature - most); });
  const float sum = float(total(x, size));
  transform(x, size, [=](FloatReg y) { return y / sum; });
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
  for_each_at_least(x, size, lower_bound, [&](int v) { candidates.push_back(x[v]); });
  return select_kth();
}

// Keep the likeliest ids such that the mass before each of them is below top_p, and renormalize. `mass` sums to 1.
inline void keep_nucleus(float* mass, int size, float top_p) {
  thread_local std::vector<std::pair<float, int>> candidates;
  // All ids with less mass than this have less than 1 - top_p together, so none of them is in the nucleus. Most nuclei
  // end before much larger masses, so those are tried first.
  const float min_mass = std::max((1 - top_p) / float(size), 1e-30f);
  double kept_mass = 0;
  size_t kept = 0;
  for (float limit = 1e-3f;; limit /= 16) {
    limit = std::max(limit, min_mass);
    candidates.clear();
    for_each_at_least(mass, size, limit, [&](int v) { candidates.emplace_back(-mass[v], v); });
    std::sort(candidates.begin(), candidates.end());
    for (kept = 0, kept_mass = 0; kept < candidates.size() && (!kept || kept_mass < top_p); kept++)
      kept_mass -= candidates[kept].first;
    if (limit == min_mass || (kept && kept_mass >= top_p)) break;
  }
  std::fill(mass, mass + size, 0.0f);
  for (size_t i = 0; i < kept; i++) mass[candidates[i].second] = float(-candidates[i].first / kept_mass);
}

inline void normalize(float* mass, int size) {
  const float sum = float(total(mass, size));
  transform(mass, size, [=](FloatReg y) { return y / sum; });
}

// Return the first id with the largest logit; -1 if a logit is NaN or the largest is infinite.
inline int32_t likeliest(const float* logits, int vocab) {
  const float most = peak(logits, vocab);
  return std::isfinite(most) ? int32_t(std::find(logits, logits + vocab, most) - logits) : -1;
}

// Compute the log-probability of `id`, and those of the `top` likeliest ids, best first. Equal logits are in order of
// the ids.
inline float logprobs(const float* logits, int vocab, int id, int top, int32_t* top_id, float* top_logprob) {
  thread_local std::vector<float> mass;
  const float most = peak(logits, vocab);
  mass.assign(logits, logits + vocab);
  transform(mass.data(), vocab, [=](FloatReg y) { return exponential(y - most); });
  const float normalizer = most + float(std::log(total(mass.data(), vocab)));
  if (top > 0) {
    thread_local std::vector<std::pair<float, int>> best;
    best.clear();
    for_each_at_least(logits, vocab, kth_largest(logits, vocab, top),
                      [&](int v) { best.emplace_back(-logits[v], v); });
    std::partial_sort(best.begin(), best.begin() + top, best.end());
    for (int i = 0; i < top; i++) {
      top_id[i] = best[i].second;
      top_logprob[i] = logits[top_id[i]] - normalizer;
    }
  }
  return logits[id] - normalizer;
}

// Turn logits into the distribution that tokens are sampled from, in place. If a logit is NaN, it is one-hot at id 0.
inline void apply_sampling(float* x, int size, const SamplingParams& params) {
  const float most = peak(x, size);
  if (!std::isfinite(most) || params.temperature == 0) {
    const auto best = most == most ? std::find(x, x + size, most) - x : 0;
    std::fill(x, x + size, 0.0f);
    x[best] = 1;
    return;
  }
  if (params.top_k < float(size)) {
    const float min_logit = kth_largest(x, size, int(params.top_k));
    transform(x, size, [=](FloatReg y) { return y < min_logit ? FloatReg{} - INFINITY : y; });
  }
  softmax(x, size, params.temperature, most);
  if (params.top_p < 1) keep_nucleus(x, size, params.top_p);
  if (params.min_p > 0) {
    const float min_mass = params.min_p * peak(x, size);
    transform(x, size, [=](FloatReg y) { return y < min_mass ? FloatReg{} : y; });
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
