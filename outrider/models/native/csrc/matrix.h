// Products with bfloat16 weights on the matrix units of recent Intel processors (AMX).
//
// A matrix register has up to 16 rows of 64 bytes. A panel of weights has the layout that these registers need: a row
// holds two inputs of each output. Sums of a row do not depend on the other rows, but they are added in another order
// than in `tile_words`, so a decoder uses either these functions for all passes, or none.
#pragma once

#include <algorithm>

#include "simd.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define OUTRIDER_MATRIX_UNITS 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {

constexpr int kMatrixRows = 16;               // rows of a matrix register
constexpr int kMatrixBlock = 2 * kMatrixRows;  // input rows that are multiplied at once

#if defined(OUTRIDER_MATRIX_UNITS)

// Return whether the system lets this process use the matrix units.
inline bool has_matrix_units() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool allowed = !syscall(SYS_arch_prctl, kRequestPermission, kTileData);
  return allowed;
}

// Configure the registers of this thread for blocks of `rows` input rows, at most kMatrixBlock.
//
// Registers 0 and 1 hold the sums of the first 16 rows for the two halves of a panel, 2 and 3 those of the other rows.
// Registers 4 and 5 hold weights, 6 and 7 inputs.
class MatrixUnits {
 public:
  ~MatrixUnits() { if (rows_) _tile_release(); }

  void configure(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    const int first = std::min(rows, kMatrixRows);
    const int second = std::max(rows - kMatrixRows, 1);
    struct alignas(64) { uint8_t palette, start, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } config = {};
    config.palette = 1;
    const int counts[] = {first, first, second, second, kMatrixRows, kMatrixRows, first, second};
    for (int i = 0; i < 8; i++) {
      config.row_bytes[i] = 64;
      config.rows[i] = uint8_t(counts[i]);
    }
    _tile_loadconfig(&config);
  }

 private:
  int rows_ = 0;
};

// Compute a panel for `rows` rows, at most kMatrixBlock: `words` words of inputs, `stride` words from row to row.
inline void multiply_panel(const int32_t* weight, const int32_t* x, int rows, int stride, int words,
                           float (&out)[kMatrixBlock][2 * kLanes]) {
  constexpr int kPanelBytes = 8 * kLanes;  // of a row of weights
  constexpr int kStep = 16;                // words in a matrix register
  constexpr int kAheadSteps = 2;           // to prefetch
  const auto prefetch = [&](int k) {
    const char* from = reinterpret_cast<const char*>(weight + size_t(k + kAheadSteps * kStep) * 2 * kLanes);
    for (int i = 0; i < kStep * kPanelBytes; i += 64) __builtin_prefetch(from + i);
  };
  _tile_zero(0);
  _tile_zero(1);
  if (rows <= kMatrixRows) {
    for (int k = 0; k < words; k += kStep) {
      prefetch(k);
      _tile_loadd(6, x + k, 4 * stride);
      _tile_loadd(4, weight + size_t(k) * 2 * kLanes, kPanelBytes);
      _tile_loadd(5, weight + size_t(k) * 2 * kLanes + kLanes, kPanelBytes);
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
    }
  } else {
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < words; k += kStep) {
      prefetch(k);
      _tile_loadd(6, x + k, 4 * stride);
      _tile_loadd(7, x + size_t(kMatrixRows) * stride + k, 4 * stride);
      _tile_loadd(4, weight + size_t(k) * 2 * kLanes, kPanelBytes);
      _tile_loadd(5, weight + size_t(k) * 2 * kLanes + kLanes, kPanelBytes);
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
    }
    _tile_stored(2, out[kMatrixRows], kPanelBytes);
    _tile_stored(3, out[kMatrixRows] + kLanes, kPanelBytes);
  }
  _tile_stored(0, out[0], kPanelBytes);
  _tile_stored(1, out[0] + kLanes, kPanelBytes);
}

// Compute 32 neighboring outputs of each row: out = x w, or out += x w with `add`.
//
// `left` and `right` hold the weights of the first and the last 16 outputs: `words` rows of 16 words, `weight_stride`
// bytes from row to row. `words` is a multiple of 16. `x_stride` and `out_stride` are bytes from row to row.
template <bool add>
inline void multiply_block(const void* left, const void* right, size_t weight_stride, const void* x, size_t x_stride,
                           int rows, int words, float* out, size_t out_stride) {
  constexpr int kStep = 16;  // words in a matrix register
  const auto at = [](const void* from, size_t bytes) { return static_cast<const char*>(from) + bytes; };
  const bool both = rows > kMatrixRows;
  float* const lower = out + kMatrixRows * out_stride / sizeof(float);
  if (add) {
    _tile_loadd(0, out, out_stride);
    _tile_loadd(1, out + kLanes, out_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (both && add) {
    _tile_loadd(2, lower, out_stride);
    _tile_loadd(3, lower + kLanes, out_stride);
  } else if (both) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < words; k += kStep) {
    _tile_loadd(4, at(left, k * weight_stride), weight_stride);
    _tile_loadd(5, at(right, k * weight_stride), weight_stride);
    _tile_loadd(6, at(x, 4 * k), x_stride);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
    if (!both) continue;
    _tile_loadd(7, at(x, kMatrixRows * x_stride + 4 * k), x_stride);
    _tile_dpbf16ps(2, 7, 4);
    _tile_dpbf16ps(3, 7, 5);
  }
  _tile_stored(0, out, out_stride);
  _tile_stored(1, out + kLanes, out_stride);
  if (!both) return;
  _tile_stored(2, lower, out_stride);
  _tile_stored(3, lower + kLanes, out_stride);
}

#else

inline bool has_matrix_units() { return false; }

struct MatrixUnits {
  void configure(int) {}
};

inline void multiply_panel(const int32_t*, const int32_t*, int, int, int, float (&)[kMatrixBlock][2 * kLanes]) {}

template <bool add>
inline void multiply_block(const void*, const void*, size_t, const void*, size_t, int, int, float*, size_t) {}

#endif

}  // namespace outrider
