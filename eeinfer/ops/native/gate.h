// Gates of exits: how likely an exit's token is the full model's. Formula and reference: `eeinfer.exits.gates`.
#pragma once

#include <algorithm>
#include <cmath>

#include "bf16.h"
#include "linear.h"

namespace ee {

// Packed matrices; what is added up at the end stays float32, since thresholds lie close to 1.
struct Gate {
  int hidden, width, tokens;
  float eps, odds_eps, odds, bias;
  const bf16 *down, *shortlist, *inner;                        // D, S, G0
  const float *shortlist_bias, *inner_bias, *outer, *trust;    // s, b0, G2, w
};

// Stores sums as float32 [rows, columns], after a bias [columns] if there is one.
struct StoreFloat {
  float* out;
  int columns;
  const float* bias;

  void operator()(int row, int column, __m512 a, __m512 b) const {
    half(row, column, a);
    half(row, column + 16, b);
  }

 private:
  void half(int row, int column, __m512 sum) const {
    if (column >= columns) return;
    const __mmask16 lanes = first_lanes(columns - column);
    if (bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(lanes, bias + column));
    _mm512_mask_storeu_ps(out + static_cast<size_t>(row) * columns + column, lanes, sum);
  }
};

// x / rms(x) in bfloat16.
inline void normed(const float* x, int size, float eps, bf16* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < size; i += 16) {
    const __m512 v = _mm512_maskz_loadu_ps(first_lanes(size - i), x + i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + eps));
  for (int i = 0; i < size; i += 16) {
    const __mmask16 lanes = first_lanes(size - i);
    store_bf16(out + i, _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), factor), lanes);
  }
}

// G2 relu(x).
inline float classified(const float* x, const float* outer, int size) {
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < size; i += 16) {
    const __mmask16 lanes = first_lanes(size - i);
    // The order of the operands of max lets NaN through.
    const __m512 v = _mm512_max_ps(_mm512_setzero_ps(), _mm512_maskz_loadu_ps(lanes, x + i));
    sum = _mm512_fmadd_ps(v, _mm512_maskz_loadu_ps(lanes, outer + i), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

// a logit(max p) + w . p, p = softmax(scores).
inline float by_shortlist(const Gate& gate, const float* scores) {
  __m512 largest = _mm512_set1_ps(-INFINITY);
  for (int i = 0; i < gate.tokens; i += 16)
    largest = _mm512_max_ps(largest, _mm512_mask_loadu_ps(largest, first_lanes(gate.tokens - i), scores + i));
  const __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  __m512 sum = _mm512_setzero_ps(), trusted = sum;
  for (int i = 0; i < gate.tokens; i += 16) {
    const __mmask16 lanes = first_lanes(gate.tokens - i);
    const __m512 e = _mm512_maskz_mov_ps(lanes, exp_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, scores + i), shift)));
    sum = _mm512_add_ps(sum, e);
    trusted = _mm512_fmadd_ps(e, _mm512_maskz_loadu_ps(lanes, gate.trust + i), trusted);
  }
  const float total = _mm512_reduce_add_ps(sum);
  const float p = std::min(std::max(1.0f / total, gate.odds_eps), 1 - gate.odds_eps);
  return gate.odds * std::log(p / (1 - p)) + _mm512_reduce_add_ps(trusted) / total;
}

inline float probability(const Gate& gate, const float* scores, const float* inner) {
  const float x = by_shortlist(gate, scores) + classified(inner, gate.outer, gate.width) + gate.bias;
  return 1.0f / (1.0f + std::exp(-x));
}

}  // namespace ee
