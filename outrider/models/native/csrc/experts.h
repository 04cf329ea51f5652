// Routed experts of an MLP: which experts a column uses, and products with the weights of the experts.
//
// The rows of a pass are grouped by expert, so that the weights of each expert that is used are read once, and those of
// the others not at all. A row of a group is one column with one of its experts. The order of operations for a row does
// not depend on the other rows, and a column adds up its experts in the order of their router logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "linear.h"
#include "threads.h"

namespace outrider {

// The rows of one expert.
struct ExpertRows {
  int32_t expert, begin, end;
};

// The experts of each column, and the rows of each expert.
struct Assignment {
  std::vector<int32_t> expert;     // [columns][top]
  std::vector<float> weight;       // [columns][top]
  std::vector<int32_t> row;        // [columns][top] where the column and its expert are among the sorted rows
  std::vector<int32_t> column;     // [columns * top] of each sorted row
  std::vector<int32_t> next;       // [experts]
  std::vector<ExpertRows> groups;  // of the experts that are used

  void reserve(int columns, int top, int experts) {
    for (auto* field : {&expert, &row, &column}) field->resize(size_t(columns) * top);
    weight.resize(size_t(columns) * top);
    next.resize(experts);
    groups.reserve(experts);
  }

  // Sort the rows by expert.
  void sort(int columns, int top, int experts) {
    const int rows = columns * top;
    std::fill(next.begin(), next.begin() + experts, 0);
    for (int i = 0; i < rows; i++) next[expert[i]]++;
    groups.clear();
    for (int e = 0, begin = 0; e < experts; e++) {
      const int count = next[e];
      if (count) groups.push_back({e, begin, begin + count});
      next[e] = begin;
      begin += count;
    }
    for (int i = 0; i < rows; i++) {
      row[i] = next[expert[i]]++;
      column[row[i]] = i / top;
    }
  }
};

// Write the `top` experts with the largest logits, and their weights: the softmax over all experts, divided by the sum
// of the chosen ones if `normalized`. Logits that are not finite give valid experts, too.
inline void choose_experts(const float* logits, int experts, int top, bool normalized, int32_t* expert, float* weight) {
  for (int rank = 0; rank < top; rank++) {
    int best = -1;
    for (int e = 0; e < experts; e++) {
      const bool taken = std::find(expert, expert + rank, e) != expert + rank;
      if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
    }
    expert[rank] = best;
    weight[rank] = std::exp(logits[best] - logits[expert[0]]);
  }
  float total = 0;
  if (normalized)
    for (int rank = 0; rank < top; rank++) total += weight[rank];
  else
    for (int e = 0; e < experts; e++) total += std::exp(logits[e] - logits[expert[0]]);
  for (int rank = 0; rank < top; rank++) weight[rank] /= total;
}

// Return the linear layer of one expert. `all` holds the layers of all experts one after another. Each has `outputs`
// outputs, padded to whole panels.
inline Linear expert_layer(const Linear& all, int expert, int outputs) {
  const size_t panels = size_t(expert) * ((outputs + kPanel - 1) / kPanel);
  Linear layer = from_panel(all, panels);
  layer.outputs = outputs;
  return layer;
}

// Multiply the rows of each expert with its weights, and write out [rows][stride]. Every thread of the team calls this.
template <Store mode>
void apply_experts(Team& team, const Linear& all, int outputs, const std::vector<ExpertRows>& groups,
                   const Rows& x, float* out, int stride) {
  const int panels = (outputs + kPanel - 1) / kPanel;
  MatrixUnits units;
  const auto work = [&](int i) {
    const ExpertRows& rows = groups[i / panels];
    const Linear layer = expert_layer(all, rows.expert, outputs);
    compute_panel<mode>(units, layer, i % panels, x, rows.begin, rows.end, out, stride);
  };
  team.share_interleaved(int(groups.size()) * panels, work, panels_per_step(all, 1));
}

}  // namespace outrider
