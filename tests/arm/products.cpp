// Products with weights of every format.
#include "blocks.cpp"
#include "check.h"
#include "linear.h"
#include "parallel.h"
#include "threads.h"

namespace outrider::test {

constexpr int kInputs = 512, kOutputs = 70, kRows = 14;

// A layer and its memory.
struct Weight {
  Linear layer{};
  std::vector<int32_t> words;
  std::vector<char> scale, minimum;
  std::vector<int8_t> sub_scale, sub_minimum, zero;
  std::vector<uint8_t> blocks;
};

// Allocate a layer without values.
inline Weight make_weight(int bits, int group, bool two_levels, Number number) {
  Weight out;
  const int count = panels(kOutputs), groups = count * kInputs / group * kPanel;
  const int scales = two_levels ? count * kInputs / kSuperBlock * kPanel : groups;
  out.words.resize(size_t(count) * kInputs * bits / 32 * kPanel);
  out.scale.resize(scales * size_of(number));
  out.minimum.resize(scales * size_of(number));
  out.sub_scale.resize(groups);
  out.sub_minimum.resize(groups);
  out.zero.resize(groups);
  out.layer.inputs = kInputs;
  out.layer.outputs = kOutputs;
  out.layer.bits = bits;
  out.layer.group = group;
  out.layer.number = number;
  return out;
}

inline void set_number(char* to, Number number, float value) {
  const uint32_t raw = outrider::bits<uint32_t>(value);
  const uint16_t bfloat16 = to_bfloat16(value);
  // A half float of a number that is neither tiny nor large, rounded to zero.
  const uint16_t half = uint16_t(raw >> 16 & 0x8000) | uint16_t((raw >> 13 & 0x3ffff) - (112 << 10));
  if (number == Number::kFloat) std::memcpy(to, &value, 4);
  if (number == Number::kBfloat16) std::memcpy(to, &bfloat16, 2);
  if (number == Number::kHalf) std::memcpy(to, &half, 2);
}

// A layer of random integers of 8 or 4 bits with scales of any type.
inline Weight make_integers(Random& random, int bits, int group, Number number, bool has_minimum, bool has_zero) {
  Weight out = make_weight(bits, group, false, number);
  random.fill_bytes(out.words.data(), 4 * out.words.size());
  for (auto* numbers : {&out.scale, &out.minimum})
    for (size_t i = 0; i < numbers->size(); i += size_of(number))
      set_number(numbers->data() + i, number, 0.01f + std::abs(random.uniform()));
  for (int8_t& zero : out.zero) zero = int8_t(random.below(16));
  out.layer.weight = out.words.data();
  out.layer.scale = out.scale.data();
  out.layer.minimum = has_minimum ? out.minimum.data() : nullptr;
  out.layer.zero = has_zero ? out.zero.data() : nullptr;
  out.layer.offset = has_minimum ? 0 : 1 << (bits - 1);
  return out;
}

// A layer of weights that are not quantized.
inline Weight make_numbers(Random& random, int bits, Values values) {
  Weight out = make_weight(bits, kGroup, false, Number::kBfloat16);
  for (int32_t& word : out.words) {
    if (bits == 32)
      set(reinterpret_cast<float&>(word), random.uniform());
    else
      for (int half = 0; half < 2; half++)
        set_number(reinterpret_cast<char*>(&word) + 2 * half, values == Values::kHalf ? Number::kHalf : Number::kBfloat16,
                   random.uniform() + (random.below(2) ? 1.5f : -1.5f));
  }
  out.layer.weight = out.words.data();
  out.layer.values = values;
  return out;
}

// A half float as a number; infinite for those that are not finite.
inline double half_to_double(uint16_t raw) {
  const int exponent = raw >> 10 & 31, fraction = raw & 1023;
  if (exponent == 31) return INFINITY;
  const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return raw & 0x8000 ? -size : size;
}

// A layer of random GGUF blocks. Their half floats are finite.
template <class Kind>
Weight make_blocks(Random& random, const char* name, std::vector<float>& dense) {
  Weight out = make_weight(Kind::bits, Kind::group, Kind::two_levels, Kind::number);
  const int row_bytes = kInputs / Kind::elements * Kind::size;
  out.blocks.resize(size_t(kOutputs) * row_bytes);
  std::vector<const uint8_t*> rows;
  for (int row = 0; row < kOutputs; row++) rows.push_back(out.blocks.data() + size_t(row) * row_bytes);
  for (size_t at = 0; at < out.blocks.size(); at += Kind::size) {
    Block block{};
    do {
      random.fill_bytes(&out.blocks[at], Kind::size);
      if (Kind::number == Number::kExponent) out.blocks[at] = uint8_t(120 + random.below(16));
      Kind::read(&out.blocks[at], block);
    } while (!std::isfinite(half_to_double(block.scale)) || !std::isfinite(half_to_double(block.minimum)));
  }
  out.layer.weight = out.words.data();
  out.layer.scale = out.scale.data();
  out.layer.minimum = Kind::has_minimum ? out.minimum.data() : nullptr;
  out.layer.sub_scale = Kind::two_levels ? out.sub_scale.data() : nullptr;
  out.layer.sub_minimum =
      Kind::two_levels && Kind::has_minimum && !Kind::joint_scales ? out.sub_minimum.data() : nullptr;
  out.layer.offset = Kind::offset;
  out.layer.values = Kind::table;
  dense.resize(size_t(kOutputs) * kInputs);
  const BlockMatrix matrix{rows.data(),
                           out.words.data(),
                           out.scale.data(),
                           reinterpret_cast<uint16_t*>(out.minimum.data()),
                           out.sub_scale.data(),
                           out.sub_minimum.data(),
                           dense.data(),
                           kInputs,
                           kOutputs};
  outrider_pack_blocks(name, &matrix);
  outrider_dequantize(name, &matrix);
  return out;
}

// The inputs of a row as the kernels use them: rounded to bytes, to bfloat16, or not at all.
inline std::vector<double> rounded(const Linear& layer, const float* x) {
  std::vector<double> out(x, x + kInputs);
  if (layer.bits == 32 || layer.values == Values::kHalf) return out;
  for (int i = 0; layer.bits == 16 && i < kInputs; i++) out[i] = to_float(to_bfloat16(x[i]));
  for (int g = 0; layer.bits < 16 && g < kInputs; g += layer.group) {
    float max = 0;
    for (int i = g; i < g + layer.group; i++) max = std::max(max, std::abs(x[i]));
    for (int i = g; i < g + layer.group; i++) out[i] = double(std::nearbyint(x[i] * (127 / max))) * (max / 127);
  }
  return out;
}

// Check the products of a layer: their values, and that no bit depends on the other rows or on the threads.
inline void check_layer(const Linear& layer, const std::string& name) {
  Random random;
  std::vector<float> x(size_t(kRows) * kInputs), dense(size_t(kOutputs) * kInputs);
  random.fill(x);
  outrider_unpack(&layer, kOutputs, kInputs, dense.data());
  std::vector<double> right, scale;
  for (int r = 0; r < kRows; r++) {
    const std::vector<double> inputs = rounded(layer, &x[size_t(r) * kInputs]);
    for (int o = 0; o < kOutputs; o++) {
      double sum = 0, size = 0;
      for (int i = 0; i < kInputs; i++) {
        sum += inputs[i] * dense[size_t(o) * kInputs + i];
        size += std::abs(inputs[i] * dense[size_t(o) * kInputs + i]);
      }
      right.push_back(sum);
      scale.push_back(size);
    }
  }
  const int stride = row_words(kInputs);
  std::vector<int32_t> words(size_t(kRows) * stride);
  const Rows rows{words.data(), stride, kRows};
  for (int r = 0; r < kRows; r++) pack_row(rows, r, &x[size_t(r) * kInputs], kInputs, layer);
  std::vector<float> alone(size_t(kRows) * kOutputs), together(alone.size());
  MatrixUnits units;
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < panels(kOutputs); p++)
      compute_panel<Store::kSet>(units, layer, p, rows, r, r + 1, alone.data(), kOutputs);
  check(close(alone, right, scale, 1e-5), name + ": values");
  for (int count = 2; count <= kRows; count++) {
    for (int p = 0; p < panels(kOutputs); p++)
      compute_panel<Store::kSet>(units, layer, p, rows, 0, count, together.data(), kOutputs);
    check(same_bits(alone.data(), together.data(), size_t(count) * kOutputs), name + ": rows " + std::to_string(count));
  }
  for (int threads = 1; threads <= 3; threads++) {
    std::fill(together.begin(), together.end(), 0.0f);
    Phases phases(threads);
    run_team(threads, [&](int thread, int size) {
      Team team{phases, thread, size, 0};
      apply<Store::kSet>(team, layer, rows, kRows, together.data(), kOutputs);
      team.join();
    });
    check(same_bits(alone.data(), together.data(), alone.size()), name + ": threads " + std::to_string(threads));
  }
}

template <class Kind>
void check_blocks(const char* name) {
  Random random;
  std::vector<float> dense;
  const Weight weight = make_blocks<Kind>(random, name, dense);
  std::vector<float> unpacked(dense.size());
  outrider_unpack(&weight.layer, kOutputs, kInputs, unpacked.data());
  check(same_bits(dense.data(), unpacked.data(), dense.size()), std::string(name) + ": packing");
  check_layer(weight.layer, name);
}

void check_products() {
  Random random;
  check_layer(make_numbers(random, 32, Values::kPlain).layer, "float32");
  check_layer(make_numbers(random, 16, Values::kPlain).layer, "bfloat16");
  check_layer(make_numbers(random, 16, Values::kHalf).layer, "float16");
  for (const int bits : {8, 4})
    for (const int group : {64, 32})
      for (const Number number : {Number::kBfloat16, Number::kHalf, Number::kFloat})
        for (const bool has_minimum : {false, true})
          for (const bool has_zero : {false, true})
            check_layer(make_integers(random, bits, group, number, has_minimum, has_zero).layer,
                        "int" + std::to_string(bits) + " in groups of " + std::to_string(group));
  check_blocks<Q8_0>("Q8_0");
  check_blocks<Q4_0>("Q4_0");
  check_blocks<Q4_1>("Q4_1");
  check_blocks<Q5_0>("Q5_0");
  check_blocks<Q5_1>("Q5_1");
  check_blocks<Q2_K>("Q2_K");
  check_blocks<Q3_K>("Q3_K");
  check_blocks<Q4_K>("Q4_K");
  check_blocks<Q5_K>("Q5_K");
  check_blocks<Q6_K>("Q6_K");
  check_blocks<MXFP4>("MXFP4");
  check_blocks<IQ4_NL>("IQ4_NL");
  check_blocks<IQ4_XS>("IQ4_XS");
}

}  // namespace outrider::test
