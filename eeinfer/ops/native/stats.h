// Statistics of rows of logits, without a softmax that is written anywhere.
#pragma once

#include <cmath>
#include <limits>

#include "bf16.h"

namespace ee {

constexpr int STATS_PARTS = 8;  // a row is always cut into so many, whatever the threads: its sums have one order

// What is known of a part of a row; parts merge in order.
struct LogitPart {
  float largest = -std::numeric_limits<float>::infinity(), second = largest;
  int64_t argmax = 0;
  float sum = 0;       // of e^(x - largest)
  float weighted = 0;  // of (x - largest) e^(x - largest)
  bool nan = false;
};

// The largest, where it first is, and the second largest; equal ones count twice.
inline void find_largest(const bf16* x, int64_t begin, int64_t end, bool second, LogitPart& part) {
  const float none = -std::numeric_limits<float>::infinity();
  __m512 best = _mm512_set1_ps(none), next = best;
  __m512i where = _mm512_set1_epi32(-1), index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __mmask16 nan = 0;
  for (int64_t i = begin; i < end; i += 16) {
    const __mmask16 lanes = first_lanes(static_cast<int>(std::min<int64_t>(16, end - i)));
    const __m512 v = _mm512_mask_mov_ps(_mm512_set1_ps(none), lanes, load_bf16(x + i, lanes));
    nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __mmask16 above = _mm512_cmp_ps_mask(v, best, _CMP_GT_OQ);
    if (second) next = _mm512_max_ps(next, _mm512_min_ps(v, best));
    where = _mm512_mask_mov_epi32(where, above, index);
    best = _mm512_max_ps(best, v);
    index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
  }
  alignas(64) float values[16], nexts[16];
  alignas(64) int32_t places[16];
  _mm512_store_ps(values, best);
  _mm512_store_ps(nexts, next);
  _mm512_store_si512(places, where);
  part.nan = nan;
  int lane = 0;
  for (int i = 1; i < 16; ++i)
    if (values[i] > values[lane] || (values[i] == values[lane] && static_cast<uint32_t>(places[i]) < static_cast<uint32_t>(places[lane]))) lane = i;
  part.largest = values[lane];
  part.argmax = begin + std::max(0, places[lane]);
  part.second = nexts[lane];
  for (int i = 0; i < 16; ++i)
    if (i != lane) part.second = std::max(part.second, values[i]);
}

inline void add_up(const bf16* x, int64_t begin, int64_t end, bool weighted, LogitPart& part) {
  if (!(part.largest > -std::numeric_limits<float>::infinity())) return;  // nothing but -inf
  const __m512 shift = _mm512_set1_ps(part.largest);
  __m512 sum = _mm512_setzero_ps(), product = _mm512_setzero_ps();
  for (int64_t i = begin; i < end; i += 16) {
    const __mmask16 lanes = first_lanes(static_cast<int>(std::min<int64_t>(16, end - i)));
    const __m512 d = _mm512_sub_ps(load_bf16(x + i, lanes), shift);
    const __m512 e = _mm512_maskz_mov_ps(lanes, exp_ps(d));
    sum = _mm512_add_ps(sum, e);
    // -inf has probability 0, and 0 * -inf counts as 0.
    if (weighted) product = _mm512_fmadd_ps(e, _mm512_max_ps(d, _mm512_set1_ps(-1e30f)), product);
  }
  part.sum = _mm512_reduce_add_ps(sum);
  part.weighted = _mm512_reduce_add_ps(product);
}

inline LogitPart stats_of_part(const bf16* row, int size, int index, bool sums, bool second, bool weighted) {
  LogitPart part;
  const int64_t begin = static_cast<int64_t>(size) * index / STATS_PARTS, end = static_cast<int64_t>(size) * (index + 1) / STATS_PARTS;
  find_largest(row, begin, end, second, part);
  if (sums) add_up(row, begin, end, weighted, part);
  return part;
}

inline void merge(LogitPart& a, const LogitPart& b) {
  const float largest = std::max(a.largest, b.largest);
  const auto moved = [&](const LogitPart& p, float& sum, float& weighted) {
    if (p.sum == 0) return;
    const float by = p.largest - largest, factor = std::exp(by);
    sum += p.sum * factor;
    weighted += (p.weighted + by * p.sum) * factor;
  };
  float sum = 0, weighted = 0;
  moved(a, sum, weighted);
  moved(b, sum, weighted);
  a.second = std::max(std::min(a.largest, b.largest), std::max(a.second, b.second));
  if (b.largest > a.largest) a.argmax = b.argmax;
  a.largest = largest, a.sum = sum, a.weighted = weighted, a.nan |= b.nan;
}

}  // namespace ee
