// Attention over cached keys and values.
#include <algorithm>

#include "attention.h"
#include "check.h"

namespace outrider::test {

// A slot with keys and values of one key head, and columns that attend to it.
template <class Element>
struct Scene {
  static constexpr int kEntries = 150, kColumns = 5, kSharing = 3, kBlocks = (kEntries + kBlock - 1) / kBlock;
  int dim;
  std::vector<Element> memory, query;
  std::vector<double> key, value;  // [entries][dim]
  std::vector<int32_t> table{1, 2, 0};
  std::vector<int32_t> position{60, 149, 100, 101, 102}, prefix{61, 150, 100, 100, 100};
  std::vector<int32_t> tail_begin{0, 0, 0, 1, 3, 6}, tail{100, 100, 102, 100, 102, 105};

  Scene(Random& random, int dim)
      : dim(dim), memory(size_t(kBlocks) * 2 * kBlock * dim), query(size_t(kColumns) * kSharing * dim) {
    for (Element& element : query) set(element, 3 * random.uniform());
    const Entries<Element> at = entries();
    for (int entry = 0; entry < kEntries; entry++)
      for (int i = 0; i < dim; i++) {
        Element& to_key = at.key(entry, 0)[at.key_offset(i)];
        Element& to_value = at.value(entry, 0)[at.value_offset(i)];
        set(to_key, random.uniform());
        set(to_value, random.uniform());
        key.push_back(to_float(to_key));
        value.push_back(to_float(to_value));
      }
  }

  Entries<Element> entries() { return {memory.data(), table.data(), int64_t(2) * kBlock * dim, dim}; }
  Columns columns() const { return {position.data(), prefix.data(), tail_begin.data(), tail.data()}; }

  // Return the outputs [columns][sharing * dim] of tiles of at most `width` columns.
  std::vector<float> attend(const Heads& heads, int width) {
    std::vector<float> out(query.size());
    Scratch<Element> scratch(dim);
    for (int c = 0; c < kColumns; c += width)
      outrider::attend(columns(), {c, std::min(c + width, kColumns)}, 0, heads, entries(), query.data(), out.data(),
                       scratch);
    return out;
  }

  // The output of one query by softmax in double precision.
  std::vector<double> right(const Heads& heads, int row) const {
    const int c = row / kSharing;
    std::vector<int> visible;
    for (int entry = 0; entry < prefix[c]; entry++) visible.push_back(entry);
    visible.insert(visible.end(), tail.begin() + tail_begin[c], tail.begin() + tail_begin[c + 1]);
    if (heads.window) {
      const int first = std::max(0, position[c] + 1 - heads.window);
      visible.erase(visible.begin(), visible.begin() + std::min(first, int(visible.size())));
    }
    std::vector<double> out(dim);
    double mass = 0;
    for (const int entry : visible) {
      double score = 0;
      for (int i = 0; i < dim; i++) score += double(to_float(query[size_t(row) * dim + i])) * key[size_t(entry) * dim + i];
      score *= heads.scale;
      if (heads.cap) score = heads.cap * std::tanh(score / heads.cap);
      mass += std::exp(score);
      for (int i = 0; i < dim; i++) out[i] += std::exp(score) * value[size_t(entry) * dim + i];
    }
    for (double& each : out) each /= mass;
    return out;
  }

  void check_all(const Heads& heads, const std::string& name) {
    const std::vector<float> out = attend(heads, 1);
    std::vector<double> expected;
    for (int row = 0; row < kColumns * kSharing; row++) {
      const std::vector<double> each = right(heads, row);
      expected.insert(expected.end(), each.begin(), each.end());
    }
    const std::vector<double> scale(expected.size(), 1.0);
    check(close(out, expected, scale, sizeof(Element) == 2 ? 4e-3 : 2e-6), name + ": values");
    for (int width = 2; width <= kColumns; width++)
      check(same_bits(out.data(), attend(heads, width).data(), out.size()), name + ": columns");
  }
};

template <class Element>
void check_attention_of(const std::string& name) {
  Random random;
  for (const int dim : {16, 64, 96}) {
    Scene<Element> scene(random, dim);
    const float scale = 1 / std::sqrt(float(dim));
    scene.check_all({Scene<Element>::kSharing, 1, dim, scale, 0, 0}, name);
    scene.check_all({Scene<Element>::kSharing, 1, dim, scale, 2, 0}, name + " with a cap");
    scene.check_all({Scene<Element>::kSharing, 1, dim, scale, 0, 40}, name + " in a window");
  }
}

void check_attention() {
  check_attention_of<float>("float32 attention");
  check_attention_of<uint16_t>("bfloat16 attention");
}

}  // namespace outrider::test
