// Quantizes packed weights to integers of 8 or 4 bits, with a scale for each output and kGroup inputs.
//
// 8 bits: weight = (code - 128) * scale. 4 bits: weight = code * scale + minimum, as 16 codes are few. Both follow from the
// range of the weights. If the importance of each input is known, those of 4 bits are fitted to the weights instead. Scales
// and minima are rounded to bfloat16 before the codes are chosen, so that this rounding adds no error.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "parallel.h"
#include "weights.h"

namespace outrider {

// The inputs of a group, of all outputs of a panel.
using Tile = float[kGroup][kPanel];

// Round to the nearest integer, ties to even. |value| < 2^22.
template <class F>
inline F rounded(F value) {
  constexpr float shift = 12582912.0f;  // floats of this size have no fraction
  return value + shift - shift;
}

// Read a group of a panel of floats or bfloat16.
void read_tile(const Linear& panel, int group, Tile& tile) {
  const int words = kGroup * panel.bits / 32;
  const auto* from = static_cast<const uint32_t*>(panel.weight) + size_t(group) * words * kPanel;
  for (int w = 0; w < words; w++, from += kPanel) {
    for (int lane = 0; lane < kPanel; lane++) {
      if (panel.bits == 32) {
        tile[w][lane] = bits<float>(from[lane]);
      } else {
        tile[2 * w][lane] = to_float(uint16_t(from[lane]));
        tile[2 * w + 1][lane] = to_float(uint16_t(from[lane] >> 16));
      }
    }
  }
}

// The numbers of a group, of all outputs of a panel.
struct GroupNumbers {
  float offset[kPanel], scale[kPanel];
  uint16_t raw_minimum[kPanel], raw_scale[kPanel];
};

// Set the numbers of a lane to scale and offset, rounded.
template <int Bits>
void set_numbers(GroupNumbers& numbers, int lane, float scale, float offset) {
  numbers.raw_minimum[lane] = to_bfloat16(offset);
  numbers.offset[lane] = Bits == 4 ? to_float(numbers.raw_minimum[lane]) : 0.0f;
  numbers.raw_scale[lane] = to_bfloat16(scale);
  numbers.scale[lane] = std::max(to_float(numbers.raw_scale[lane]), std::numeric_limits<float>::min());
}

template <int Bits>
GroupNumbers choose_numbers(const Tile& tile) {
  float low[kPanel], high[kPanel];
  for (int lane = 0; lane < kPanel; lane++) low[lane] = high[lane] = tile[0][lane];
  for (int i = 1; i < kGroup; i++) {
    for (int lane = 0; lane < kPanel; lane++) {
      low[lane] = std::min(low[lane], tile[i][lane]);
      high[lane] = std::max(high[lane], tile[i][lane]);
    }
  }
  GroupNumbers numbers;
  for (int lane = 0; lane < kPanel; lane++) {
    const float largest = Bits == 4 ? high[lane] - to_float(to_bfloat16(low[lane])) : std::max(high[lane], -low[lane]);
    set_numbers<Bits>(numbers, lane, largest / (Bits == 4 ? 15.0f : 127.0f), low[lane]);
  }
  return numbers;
}

// Fit the numbers of 4 bits: least squares, in which each input has a weight, its importance. The codes depend on the
// numbers. The first codes are those of a range that is a little smaller than that of the weights.
GroupNumbers fit_numbers(const Tile& tile, const float* importance) {
  constexpr int kFits = 2;
  constexpr float kShare = 0.95f;
  GroupNumbers numbers;
  float total = 0;
  for (int i = 0; i < kGroup; i++) total += importance[i];
  for (int lane = 0; lane < kPanel; lane += kRegLanes) {
    const auto weight = [&](int i) { return load_reg(&tile[i][lane]); };
    FloatReg low = weight(0), high = low, sum{};
    for (int i = 0; i < kGroup; i++) {
      low = minimum(low, weight(i));
      high = maximum(high, weight(i));
      sum += importance[i] * weight(i);
    }
    const FloatReg zero{}, last = zero + 15.0f, least = zero + std::numeric_limits<float>::min();
    FloatReg scale = (high - low) * (kShare / 15), offset = low + (high - low) * ((1 - kShare) / 2);
    for (int fit = 0; fit < kFits; fit++) {
      const FloatReg inverse = 1 / maximum(scale, least);
      FloatReg codes{}, squares{}, products{};
      for (int i = 0; i < kGroup; i++) {
        const FloatReg code = rounded(minimum(maximum((weight(i) - offset) * inverse, zero), last));
        const FloatReg weighted = importance[i] * code;
        codes += weighted;
        squares += weighted * code;
        products += weighted * weight(i);
      }
      const FloatReg determinant = total * squares - codes * codes;
      const FloatReg slope = (total * products - codes * sum) / determinant;
      scale = determinant > 1e-6f * total * squares ? slope : scale;  // if all codes are equal, any scale does
      if (total > 0) offset = (sum - scale * codes) / total;
    }
    for (int i = 0; i < kRegLanes; i++) set_numbers<4>(numbers, lane + i, scale[i], offset[i]);
  }
  return numbers;
}

// Replace the values of a group by their codes.
template <int Bits>
void choose_codes(Tile& tile, const GroupNumbers& numbers) {
  constexpr float low = Bits == 4 ? 0.0f : -127.0f, high = Bits == 4 ? 15.0f : 127.0f, first = Bits == 4 ? 0.0f : 128.0f;
  for (int i = 0; i < kGroup; i++) {
    for (int lane = 0; lane < kPanel; lane++) {
      const float steps = (tile[i][lane] - numbers.offset[lane]) / numbers.scale[lane];
      tile[i][lane] = rounded(std::min(std::max(steps, low), high)) + first;
    }
  }
}

// Write the codes of a group to its words.
template <int Bits>
void write_codes(const Tile& tile, uint32_t* words) {
  constexpr int codes = 32 / Bits;  // of a word
  for (int w = 0; w < kGroup / codes; w++, words += kPanel) {
    for (int lane = 0; lane < kPanel; lane++) words[lane] = 0;
    for (int c = 0; c < codes; c++) {
      const int place = c % 4 * 8 + c / 4 * Bits;
      for (int lane = 0; lane < kPanel; lane++) words[lane] |= uint32_t(int32_t(tile[codes * w + c][lane])) << place;
    }
  }
}

// Return where row `index` of a panel's numbers is written.
template <class T>
T* place(const void* numbers, int index) {
  return static_cast<T*>(const_cast<void*>(numbers)) + size_t(index) * kPanel;
}

template <int Bits>
void quantize_group(Tile& tile, const Linear& to, int group, const float* importance) {
  const bool fits = Bits == 4 && importance;
  const GroupNumbers numbers = fits ? fit_numbers(tile, importance + group * kGroup) : choose_numbers<Bits>(tile);
  choose_codes<Bits>(tile, numbers);
  write_codes<Bits>(tile, place<uint32_t>(to.weight, group * kGroup * Bits / 32));
  std::copy_n(numbers.raw_scale, kPanel, place<uint16_t>(to.scale, group));
  if (Bits == 4) std::copy_n(numbers.raw_minimum, kPanel, place<uint16_t>(to.minimum, group));
}

void quantize_panel(const Linear& from, const Linear& to, int columns, const float* importance) {
  const bool floats = from.bits >= 16 && from.values == Values::kPlain;
  const int rows = std::min(kPanel, to.outputs);
  std::vector<float> dense(floats ? 0 : size_t(kPanel) * to.inputs);
  if (!floats) {
    for (int r = 0; r < rows; r++) read_row(from, r, columns, &dense[size_t(r) * to.inputs]);
  }
  Tile tile;
  for (int group = 0; group < to.inputs / kGroup; group++) {
    if (floats) {
      read_tile(from, group, tile);
    } else {
      for (int i = 0; i < kGroup; i++) {
        for (int lane = 0; lane < kPanel; lane++) tile[i][lane] = dense[size_t(lane) * to.inputs + group * kGroup + i];
      }
    }
    to.bits == 4 ? quantize_group<4>(tile, to, group, importance) : quantize_group<8>(tile, to, group, nullptr);
  }
}

}  // namespace outrider

using namespace outrider;

// Write a packed weight with 8 or 4 bits. It has `columns` inputs without padding. `importance` [inputs] is that of the
// square error of each input, or null.
extern "C" void outrider_quantize(const Linear* from, const Linear* to, int32_t columns, const float* importance) {
  const int panels = (to->outputs + kPanel - 1) / kPanel;
  parallel_for(panels, [&](int panel) {
    quantize_panel(from_panel(*from, panel), from_panel(*to, panel), columns, importance);
  });
}
