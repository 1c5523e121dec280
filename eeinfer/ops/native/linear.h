// out = x W^T for few or many rows of bfloat16, with what follows applied while the sums are in registers.
//
// Packing: W [columns, inputs] is cut into panels of 32 columns, padded with zeros. A panel holds, for each pair of
// inputs, the pairs of its 32 columns side by side: [panel][inputs / 2][32][2]. One register then holds a pair of inputs
// of 16 columns, which is what the bfloat16 dot product takes, and a panel is read from front to back.
//
// Every sum is one accumulator that runs over the inputs in order, whatever the number of rows: a row's result is
// bitwise the same in any batch.
#pragma once

#include <algorithm>

#include "bf16.h"
#include "threads.h"

namespace ee {

constexpr int PANEL = 32;
constexpr int MOST_ROWS = 12;  // 24 sums in registers, two weights, one input
constexpr int NEAR = 1 << 17;  // inputs that stay in a core's own cache while the panels go by

inline int panels_of(int columns) { return (columns + PANEL - 1) / PANEL; }

inline size_t panel_size(int inputs) { return static_cast<size_t>(inputs) * PANEL; }

inline void pack(const bf16* w, int columns, int inputs, bf16* out) {
  for (int panel = 0; panel < panels_of(columns); ++panel)
    for (int k = 0; k < inputs; k += 2)
      for (int c = 0; c < PANEL; ++c) {
        const int column = panel * PANEL + c;
        const bf16* from = w + static_cast<size_t>(column) * inputs + k;
        *out++ = column < columns ? from[0] : 0;
        *out++ = column < columns ? from[1] : 0;
      }
}

// A row of what was packed, as it was.
inline void packed_row(const bf16* packed, int inputs, int64_t row, bf16* out) {
  const bf16* from = packed + row / PANEL * panel_size(inputs) + row % PANEL * 2;
  for (int k = 0; k < inputs; k += 2, from += 2 * PANEL) {
    _mm_prefetch(reinterpret_cast<const char*>(from + 32 * 2 * PANEL), _MM_HINT_T0);
    std::memcpy(out + k, from, 2 * sizeof(bf16));
  }
}

// Rows of x begin `stride` apart.
template <int ROWS>
inline void sums(const bf16* x, int stride, int inputs, const bf16* panel, __m512 (&acc)[ROWS][2]) {
  for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
  for (int k = 0; k < inputs; k += 2, panel += 2 * PANEL) {
    if constexpr (ROWS <= 4) _mm_prefetch(reinterpret_cast<const char*>(panel + 24 * 64), _MM_HINT_T0), _mm_prefetch(reinterpret_cast<const char*>(panel + 24 * 64 + 32), _MM_HINT_T0);
    const __m512bh w0 = pairs(panel), w1 = pairs(panel + PANEL);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const __m512bh in = broadcast_pair(x + static_cast<size_t>(r) * stride + k);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, in);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, in);
    }
  }
}

template <int ROWS, class Finish>
inline void block(const bf16* x, int row, int inputs, const bf16* panel, int column, const Finish& finish) {
  __m512 acc[ROWS][2];
  sums<ROWS>(x + static_cast<size_t>(row) * inputs, inputs, inputs, panel, acc);
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r) finish(row + r, column, acc[r][0], acc[r][1]);
}

// Runs `finish(row, column, sums of 16 columns from `column`, sums of the next 16)` for every row and each of the panels.
template <class Finish>
inline void linear(const bf16* x, int rows, int inputs, const bf16* packed, Share panels, const Finish& finish) {
  const int blocks = (rows + MOST_ROWS - 1) / MOST_ROWS, near = std::max(1, NEAR / (MOST_ROWS * inputs));
  for (int first = 0; first < blocks; first += near) {
    const int end = std::min(blocks, first + near);
    for (int panel = panels.begin; panel < panels.end; ++panel) {
      const bf16* weights = packed + panel * panel_size(inputs);
      const int column = panel * PANEL;
      for (int b = first; b < end; ++b) {
        const Share own(rows, b, blocks);
        switch (own.end - own.begin) {
#define EE_BLOCK(N) case N: block<N>(x, own.begin, inputs, weights, column, finish); break
          EE_BLOCK(1); EE_BLOCK(2); EE_BLOCK(3); EE_BLOCK(4); EE_BLOCK(5); EE_BLOCK(6);
          EE_BLOCK(7); EE_BLOCK(8); EE_BLOCK(9); EE_BLOCK(10); EE_BLOCK(11); EE_BLOCK(12);
#undef EE_BLOCK
        }
      }
    }
  }
}

// Stores sums as bfloat16 [rows, columns], after a bias [columns] and a residual [rows, columns] if there are any, with
// one rounding. Rows begin `stride` apart, in the residual too.
struct Store {
  bf16* out;
  int columns;
  const bf16* bias;
  int stride;
  const bf16* residual = nullptr;

  void operator()(int row, int column, __m512 a, __m512 b) const {
    half(row, column, a);
    half(row, column + 16, b);
  }

 private:
  void half(int row, int column, __m512 sum) const {
    if (column >= columns) return;
    const __mmask16 lanes = first_lanes(columns - column);
    const size_t at = static_cast<size_t>(row) * stride + column;
    if (bias) sum = _mm512_add_ps(sum, load_bf16(bias + column, lanes));
    if (residual) sum = _mm512_add_ps(sum, load_bf16(residual + at, lanes));
    store_bf16(out + at, sum, lanes);
  }
};

// silu(gate) * up, [rows, width]. A panel holds 16 columns of gate and the same 16 of up.
struct GatedSilu {
  bf16* out;
  int width;
  const bf16* gate_bias;
  const bf16* up_bias;

  void operator()(int row, int column, __m512 gate, __m512 up) const {
    const int at = column / 2;
    const __mmask16 lanes = first_lanes(width - at);
    if (gate_bias) {
      gate = _mm512_add_ps(gate, load_bf16(gate_bias + at, lanes));
      up = _mm512_add_ps(up, load_bf16(up_bias + at, lanes));
    }
    store_bf16(out + static_cast<size_t>(row) * width + at, _mm512_mul_ps(silu(gate), up), lanes);
  }
};

}  // namespace ee
