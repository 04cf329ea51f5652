// Changes of logits before a distribution is computed from them: logit_bias, penalties and min_tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace outrider {

// How the logits of a sequence are changed: verify/sampling.py.
struct Adjustment {
  const int32_t* token;    // [num_tokens] ids of the prompt, then of the output; none without penalties
  const int32_t* bias_id;  // [num_biases]
  const float* bias;       // [num_biases]
  const int32_t* end_id;   // [num_ends]
  int32_t num_tokens, num_prompt, num_biases, num_ends;
  int32_t minimum;         // further tokens before which no end token may come
  float repetition, presence, frequency;
};

// Change the logits [size] after the text of a sequence and `path` [depth]. Logit i is that of token id[i], which ascend, or
// of token i without ids.
inline void adjust(float* logits, int size, const Adjustment& a, const int32_t* path, int depth,
                   const int32_t* id = nullptr) {
  // Return the index of a token, or -1.
  const auto index = [&](int32_t token) {
    if (!id) return token < size ? token : -1;
    const auto* at = std::lower_bound(id, id + size, token);
    return at < id + size && *at == token ? int32_t(at - id) : -1;
  };
  for (int i = 0; i < a.num_biases; i++)
    if (const int at = index(a.bias_id[i]); at >= 0) logits[at] += a.bias[i];
  if (a.num_tokens) {
    thread_local std::vector<int32_t> counts;  // [size] one more than the count in the output; 0: not seen
    thread_local std::vector<int32_t> seen;
    if (counts.size() < size_t(size)) counts.resize(size);
    seen.clear();
    const auto see = [&](int32_t token, int count) {
      const int at = index(token);
      if (at < 0) return;
      if (!counts[at]) {
        counts[at] = 1;
        seen.push_back(at);
      }
      counts[at] += count;
    };
    for (int i = 0; i < a.num_tokens; i++) see(a.token[i], i >= a.num_prompt);
    for (int i = 0; i < depth; i++) see(path[i], 1);
    for (const int at : seen) {
      const float count = float(counts[at] - 1);
      float& logit = logits[at];
      logit = logit < 0 ? logit * a.repetition : logit / a.repetition;
      logit -= a.frequency * count;
      if (count) logit -= a.presence;
      counts[at] = 0;
    }
  }
  for (int i = 0; i < (depth < a.minimum ? a.num_ends : 0); i++)
    if (const int at = index(a.end_id[i]); at >= 0) logits[at] = -INFINITY;
}

}  // namespace outrider
