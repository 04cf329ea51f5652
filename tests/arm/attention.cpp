// Attention over cached keys and values.
#include <algorithm>

#include "attention.h"
#include "check.h"

namespace outrider::test {

// A slot with keys and values of one key head, and columns that attend to it.
template <class Element>
struct Scene {
  static constexpr double kTolerance = kIntegers<Element> ? 2e-4 : sizeof(Element) == 2 ? 4e-3 : 2e-6;
  static constexpr int kEntries = 600, kColumns = 5, kSharing = 3, kBlocks = (kEntries + kBlock - 1) / kBlock;
  int dim;
  std::vector<Element> memory;
  std::vector<Factor<Element>> query;
  std::vector<float> query_scale;  // [columns * sharing]
  std::vector<double> key, value;  // [entries][dim]
  std::vector<int32_t> table{1, 2, 0, 9, 8, 7, 6, 5, 4, 3};
  std::vector<int32_t> position{60, 599, 100, 101, 102}, prefix{61, 600, 100, 100, 100};
  std::vector<int32_t> tail_begin{0, 0, 0, 1, 3, 6}, tail{100, 100, 102, 100, 102, 105};

  Scene(Random& random, int dim)
      : dim(dim), memory(size_t(kBlocks) * 2 * part_size<Element>(dim)), query(size_t(kColumns) * kSharing * dim) {
    std::vector<float> x(dim);
    const auto draw = [&](float scale) {
      for (float& each : x) each = scale * random.uniform();
      return x.data();
    };
    for (int row = 0; row < kColumns * kSharing; row++)
      query_scale.push_back(round_all(draw(3), dim, &query[size_t(row) * dim]));
    const Entries<Element> at = entries();
    for (int entry = 0; entry < kEntries; entry++) {
      at.set_key(entry, 0, draw(1));
      at.set_value(entry, 0, draw(1));
      for (int i = 0; i < dim; i++) {
        key.push_back(number(at.keys(entry, 0), entry, at.key(entry, 0)[at.key_offset(i)]));
        value.push_back(number(at.values(entry, 0), entry, at.value(entry, 0)[at.value_offset(i)]));
      }
    }
  }

  // Return a cached number.
  double number(const Element* part, int entry, Element element) const {
    if constexpr (kIntegers<Element>)
      return double(element) * scales_of(part, dim)[entry % kBlock];
    else
      return to_float(element);
  }

  double query_number(int row, int i) const {
    const auto element = query[size_t(row) * dim + i];
    if constexpr (kIntegers<Element>)
      return double(element) * query_scale[row];
    else
      return to_float(element);
  }

  Entries<Element> entries() { return {memory.data(), table.data(), 2 * part_size<Element>(dim), dim}; }
  Columns columns() const { return {position.data(), prefix.data(), tail_begin.data(), tail.data()}; }

  // Return the outputs [columns][sharing * dim] of tiles of at most `width` columns.
  std::vector<float> attend(const Heads& heads, int width) {
    std::vector<float> out(query.size());
    Scratch<Element> scratch(dim);
    for (int c = 0; c < kColumns; c += width)
      outrider::attend<Element>(columns(), {c, std::min(c + width, kColumns)}, 0, heads, entries(),
                                {query.data(), query_scale.data()}, out.data(), scratch);
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
      for (int i = 0; i < dim; i++) score += query_number(row, i) * key[size_t(entry) * dim + i];
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
    check(close(out, expected, scale, kTolerance), name + ": values");
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
  check_attention_of<int8_t>("int8 attention");
}

}  // namespace outrider::test
