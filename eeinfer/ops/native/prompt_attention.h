// Attention of many tokens of one sequence over its cached keys, which then are worth packing: for the query heads of
// one KV head, blocks of rows (a row is one query head of one token) against all keys that any of them sees.
//
// A row's result has the very bits that `attend` gives it: the same sums in the same order, but each lane holds another
// key, or another dimension, so that nothing is added across lanes.
#pragma once

#include <algorithm>

#include "attention.h"
#include "linear.h"
#include "scratch.h"

namespace ee {

// The keys and values of one KV head of a sequence, packed as the blocks below read them: K as [tiles][head_dim / 2][16
// keys][2], V as panels of 32 dimensions, [head_dim / 32][padded keys / 2][32][2]. What is beyond the keys is zero.
class PackedKV {
 public:
  // Packs the first `keys` keys, unless that has been done since `forget`.
  template <int CHUNKS>
  void pack(const CacheView& cache, const int64_t* table, int kv_head, int keys) {
    if (table == table_ && kv_head == kv_head_ && keys <= keys_) return;
    table_ = table, kv_head_ = kv_head, keys_ = keys, padded_ = TILE * tiles_of(keys);
    constexpr int head_dim = CHUNKS * 32;
    const size_t half = static_cast<size_t>(padded_) * head_dim;
    k_ = memory_.take<bf16>(2 * half), v_ = k_ + half;
    static const bf16 none[head_dim] = {};
    Walk walk(cache, table);
    for (int tile = 0; tile < padded_ / TILE; ++tile) {
      const bf16 *k[TILE], *v[TILE];
      for (int i = 0; i < TILE; ++i) {
        const bool there = tile * TILE + i < keys;
        const size_t at = there ? walk.next() + static_cast<size_t>(kv_head) * head_dim : 0;
        k[i] = there ? cache.k + at : none, v[i] = there ? cache.v + at : none;
      }
      for (int c = 0; c < CHUNKS; ++c) {
        keys_side_by_side(k, 32 * c, k_ + (static_cast<size_t>(tile) * CHUNKS + c) * TILE * 32);
        for (int i = 0; i < TILE; i += 2)
          interleave(v[i] + 32 * c, v[i + 1] + 32 * c, v_ + (static_cast<size_t>(c) * padded_ + tile * TILE + i) * 32);
      }
    }
  }

  // For another layer, or another batch: the same places hold other keys.
  void forget() { table_ = nullptr; }

  const bf16* k(int tile, int head_dim) const { return k_ + static_cast<size_t>(tile) * TILE * head_dim; }
  const bf16* v(int chunk) const { return v_ + static_cast<size_t>(chunk) * padded_ * 32; }

 private:
  // The pairs from `start` on of 16 rows, 16 pairs each, as 16 registers that hold the same pair of all rows.
  static void keys_side_by_side(const bf16* const (&rows)[TILE], int start, bf16* out) {
    __m512i x[16], y[16];
    for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(rows[i] + start);
    for (int i = 0; i < 16; i += 2) {
      y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
      y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
      x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
      x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
      x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    // x[4 a + b] holds pairs b, b + 4, b + 8 and b + 12 of rows 4 a … 4 a + 3.
    for (int b = 0; b < 4; ++b) {
      const __m512i even = _mm512_shuffle_i32x4(x[b], x[4 + b], 0x88), odd = _mm512_shuffle_i32x4(x[b], x[4 + b], 0xdd);
      const __m512i even2 = _mm512_shuffle_i32x4(x[8 + b], x[12 + b], 0x88), odd2 = _mm512_shuffle_i32x4(x[8 + b], x[12 + b], 0xdd);
      _mm512_storeu_si512(out + 32 * b, _mm512_shuffle_i32x4(even, even2, 0x88));
      _mm512_storeu_si512(out + 32 * (b + 4), _mm512_shuffle_i32x4(odd, odd2, 0x88));
      _mm512_storeu_si512(out + 32 * (b + 8), _mm512_shuffle_i32x4(even, even2, 0xdd));
      _mm512_storeu_si512(out + 32 * (b + 12), _mm512_shuffle_i32x4(odd, odd2, 0xdd));
    }
  }

  // Two rows of 32 as 32 pairs.
  static void interleave(const bf16* a, const bf16* b, bf16* out) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi64(low, first, high));
    _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi64(low, second, high));
  }

  Scratch memory_;
  bf16 *k_ = nullptr, *v_ = nullptr;
  const int64_t* table_ = nullptr;
  int kv_head_ = 0, keys_ = 0, padded_ = 0;
};

// Scores of ROWS rows against the keys of TILES packed tiles, [ROWS, `stride`]. The order of each sum is that of
// `sums_of_16` over what `attend` adds up in its lanes.
template <int CHUNKS, int ROWS, int TILES>
inline void scores_of(const bf16* const* q, const bf16* k, float scale, float* out, int stride) {
  constexpr int sums = ROWS * TILES, tile_size = TILE * CHUNKS * 32;
  __m512 quarters[4][sums];
  for (int quarter = 0; quarter < 4; ++quarter) {
    __m512 lane[4][sums];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int at = (quarter * 4 + i) * 2;  // the dimension of the pair
      for (int s = 0; s < sums; ++s) lane[i][s] = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int c = 0; c < CHUNKS; ++c) {
        __m512bh keys[TILES];
        for (int t = 0; t < TILES; ++t) keys[t] = pairs(k + t * tile_size + (c * 32 + at) * TILE);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          const __m512bh query = broadcast_pair(q[r] + 32 * c + at);
          for (int t = 0; t < TILES; ++t) lane[i][r * TILES + t] = _mm512_dpbf16_ps(lane[i][r * TILES + t], keys[t], query);
        }
      }
    }
    for (int s = 0; s < sums; ++s)
      quarters[quarter][s] = _mm512_add_ps(_mm512_add_ps(lane[0][s], lane[2][s]), _mm512_add_ps(lane[1][s], lane[3][s]));
  }
  for (int s = 0; s < sums; ++s) {
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(quarters[0][s], quarters[1][s]), _mm512_add_ps(quarters[2][s], quarters[3][s]));
    _mm512_storeu_ps(out + s / TILES * static_cast<size_t>(stride) + s % TILES * TILE, _mm512_mul_ps(sum, _mm512_set1_ps(scale)));
  }
}

// Rows of one KV head: where each begins, how many keys it sees, and where its result goes.
struct Rows {
  int count;
  const bf16* q[MOST_ROWS];
  int context[MOST_ROWS];
  bf16* out[MOST_ROWS];
};

// The average of the values, weighted by the probabilities, of ROWS rows.
template <int CHUNKS, int ROWS>
inline void weighted_values(const Rows& rows, const PackedKV& kv, const bf16* weights, int stride, int padded, const float* inverse) {
  for (int c = 0; c < CHUNKS; ++c) {
    __m512 acc[ROWS][2];
    sums<ROWS>(weights, stride, padded, kv.v(c), acc);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
      for (int half = 0; half < 2; ++half)
        store_bf16(rows.out[r] + 32 * c + 16 * half, _mm512_mul_ps(acc[r][half], _mm512_set1_ps(inverse[r])));
  }
}

// Attention of up to MOST_ROWS rows; the last of them sees most keys. `scores` has room for MOST_ROWS * padded keys.
template <int CHUNKS>
inline void attend_rows(Rows& rows, const PackedKV& kv, float scale, float* scores) {
  constexpr int head_dim = CHUNKS * 32, most = 4;  // rows that are scored together
  const int tiles = tiles_of(rows.context[rows.count - 1]), padded = TILE * tiles;
  for (int r = 0; r < rows.count; r += most) {
    const bf16* q[most];
    for (int i = 0; i < most; ++i) q[i] = rows.q[std::min(r + i, rows.count - 1)];
    float* to = scores + static_cast<size_t>(r) * padded;
    int tile = 0;
    for (; tile + 2 <= tiles; tile += 2) scores_of<CHUNKS, most, 2>(q, kv.k(tile, head_dim), scale, to + tile * TILE, padded);
    if (tile < tiles) scores_of<CHUNKS, most, 1>(q, kv.k(tile, head_dim), scale, to + tile * TILE, padded);
  }
  float inverse[MOST_ROWS];
  for (int r = 0; r < rows.count; ++r) {
    float* own = scores + static_cast<size_t>(r) * padded;
    inverse[r] = softmax(own, rows.context[r]);
    const int written = TILE * tiles_of(rows.context[r]);
    std::memset(probabilities(own) + written, 0, (padded - written) * sizeof(bf16));
  }
  switch (rows.count) {
#define EE_ROWS(N) case N: weighted_values<CHUNKS, N>(rows, kv, probabilities(scores), 2 * padded, padded, inverse); break
    EE_ROWS(1); EE_ROWS(2); EE_ROWS(3); EE_ROWS(4); EE_ROWS(5); EE_ROWS(6);
    EE_ROWS(7); EE_ROWS(8); EE_ROWS(9); EE_ROWS(10); EE_ROWS(11); EE_ROWS(12);
#undef EE_ROWS
  }
}

}  // namespace ee
