#include "pool.h"

namespace outrider {
namespace {

// Write x - offset times a Hadamard matrix, in parts of as many numbers as the largest power of two that divides `dim`. It
// spreads a large number, so bytes lose less, and keeps dot products. `spread` in models/cache/paged.py does the same.
const float* spread(const float* x, const float* offset, int dim, float* out) {
  const int part = dim & -dim;
  const float norm = std::sqrt(float(part));
  for (int i = 0; i < dim; i++) out[i] = (offset ? x[i] - offset[i] : x[i]) / norm;
  for (int half = 1; half < part; half *= 2)
    for (int begin = 0; begin < dim; begin += 2 * half)
      for (int i = begin; i < begin + half; i++) {
        const float first = out[i], second = out[i + half];
        out[i] = first + second;
        out[i + half] = first - second;
      }
  return out;
}

template <class Element>
class PoolAttention final : public Attention {
 public:
  PoolAttention(const Pool& pool, const Heads& heads, int threads) : pool_(pool), heads_(heads) {
    for (int i = 0; i < threads; i++) scratch_.emplace_back(heads.dim);
  }

  void reserve(int columns, int sections, int width) override {
    section_size_ = size_t(width) * (heads_.query / heads_.key) * Sums::row_size(heads_.dim);
    sections_.resize(std::max(sections_.size(), sections * section_size_));
    query_.resize(std::max(query_.size(), size_t(columns) * heads_.query * heads_.dim));
    query_scale_.resize(std::max(query_scale_.size(), size_t(columns) * heads_.query));
  }

  void set_query(int column, int head, const float* x) override {
    const size_t number = size_t(column) * heads_.query + head;
    float numbers[kMaxHeadDim];
    if (kIntegers<Element>) x = spread(x, nullptr, heads_.dim, numbers);
    query_scale_[number] = round_all(x, heads_.dim, &query_[number * heads_.dim]);
  }

  void set_key(int slot, int layer, int entry, int head, const float* x) override {
    float numbers[kMaxHeadDim];
    const float* offset = pool_.key_offset + size_t(layer * heads_.key + head) * heads_.dim;
    if (kIntegers<Element>) x = spread(x, offset, heads_.dim, numbers);
    entries(slot, layer).set_key(entry, head, x);
  }

  void set_value(int slot, int layer, int entry, int head, const float* x) override {
    entries(slot, layer).set_value(entry, head, x);
  }

  void attend(const Columns& columns, const Tile& tile, int slot, int layer, int head, const Heads& heads, float* out,
              int thread) override {
    outrider::attend<Element>(columns, tile, head, heads, entries(slot, layer), queries(), out, scratch_[thread]);
  }

  void attend_section(const Columns& columns, const Tile& tile, int slot, int layer, int head, const Heads& heads, int section,
                   int number, int thread) override {
    outrider::attend_section<Element>(columns, tile, head, heads, section, entries(slot, layer), queries(),
                                   &sections_[number * section_size_], scratch_[thread]);
  }

  void add_sections(const Tile& tile, int head, const Heads& heads, int number, int count, float* out,
                 int thread) override {
    const int rows = (tile.last - tile.first) * (heads.query / heads.key);
    const Sums all{scratch_[thread].all.data(), heads.dim};
    all.clear(rows);
    for (int i = number; i < number + count; i++) add_section({&sections_[i * section_size_], heads.dim}, rows, all);
    write_outputs(all, tile, head, heads, out);
  }

 private:
  Entries<Element> entries(int slot, int layer) const {
    const int64_t layer_size = 2 * heads_.key * part_size<Element>(heads_.dim);  // elements of a layer in a block
    Element* first = static_cast<Element*>(pool_.entries) + layer * layer_size;
    return {first, pool_.table + int64_t(slot) * pool_.reach, pool_.layers * layer_size, heads_.dim};
  }

  Queries<Element> queries() const { return {query_.data(), query_scale_.data()}; }

  const Pool& pool_;  // its memory may be replaced
  Heads heads_;
  std::vector<Factor<Element>> query_;     // [columns][query heads][dim]
  std::vector<float> query_scale_;         // [columns][query heads]
  std::vector<float> sections_;               // [sections][section_size_] sums of sections
  size_t section_size_ = 0;
  std::vector<Scratch<Element>> scratch_;  // [threads]
};

}  // namespace

std::unique_ptr<Attention> make_attention(const Pool& pool, const Heads& heads, int threads) {
  if (pool.bits == 8) return std::make_unique<PoolAttention<int8_t>>(pool, heads, threads);
  if (pool.bits == 16) return std::make_unique<PoolAttention<uint16_t>>(pool, heads, threads);
  return std::make_unique<PoolAttention<float>>(pool, heads, threads);
}

}  // namespace outrider
