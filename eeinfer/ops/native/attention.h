// Softmax attention of one token over the cached keys of its sequence.
#pragma once

#include <algorithm>
#include <cmath>

#include "bf16.h"

namespace ee {

// One layer's cache: K and V, [blocks, block_size, kv_heads, head_dim] each.
struct CacheView {
  bf16 *k, *v;
  int block_size, kv_heads, head_dim;

  size_t stride() const { return static_cast<size_t>(kv_heads) * head_dim; }  // from one token to the next
};

// Walks over the cached tokens of a sequence from position 0 on; gives the place of each in K and V.
class Walk {
 public:
  Walk(const CacheView& cache, const int64_t* table) : cache_(cache), table_(table) {}

  size_t next() {
    if (left_ == 0) {
      left_ = cache_.block_size;
      at_ = static_cast<size_t>(*table_++) * cache_.block_size * cache_.stride();
    }
    --left_;
    const size_t here = at_;
    at_ += cache_.stride();
    return here;
  }

 private:
  const CacheView& cache_;
  const int64_t* table_;
  int left_ = 0;
  size_t at_ = 0;
};

// Sums of 16 registers, one a lane.
inline __m512 sums_of_16(__m512 (&x)[16]) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 4; ++i)
    b[i] = _mm512_add_ps(_mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44), _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
  // Each 128 bits of b[i] now hold a part of the sums of x[4 i] … x[4 i + 3].
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88), _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

// Where softmax leaves its results: over the scores themselves, of which it has read more than it has written.
inline bf16* probabilities(float* scores) { return reinterpret_cast<bf16*>(scores); }

// exp(score - largest) as bfloat16, zero beyond `context` up to the next 16; returns one over the sum of what it wrote.
inline float softmax(float* scores, int context) {
  const __m512 none = _mm512_set1_ps(-INFINITY);
  __m512 largest = none;
  for (int i = 0; i < context; i += 16)
    largest = _mm512_max_ps(largest, _mm512_mask_loadu_ps(none, first_lanes(context - i), scores + i));
  const __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  __m512 total = _mm512_setzero_ps();
  for (int i = 0; i < context; i += 16) {
    const __mmask16 lanes = first_lanes(context - i);
    const __m512 e = exp_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, scores + i), shift));
    const __m256i kept = narrow(_mm512_maskz_mov_ps(lanes, e));
    total = _mm512_add_ps(total, widen(kept));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(probabilities(scores) + i), kept);
  }
  return 1.0f / _mm512_reduce_add_ps(total);
}

constexpr int TILE = 16;  // tokens that are looked at together

inline int tiles_of(int context) { return (context + TILE - 1) / TILE; }

// The query heads of some neighbouring KV heads of one token, and what they attend to.
struct Query {
  const CacheView& cache;
  const int64_t* table;
  int context;             // positions 0 … context - 1
  int first, end;          // KV heads
  const bf16* q;           // [kv_heads, group, head_dim]
  int group;
  float scale;
  float* scores;           // room for (end - first) * GROUP * (TILE * tiles + head_dim + 1)
  bf16* out;               // as q
};

// Fetches a tile ahead of its use. Blocks lie anywhere, so that the hardware cannot see which comes next; and little by
// little, since a core waits once it has asked for more than some twenty lines at a time.
class Fetch {
 public:
  Fetch(const Query& a, const bf16* half, int steps)
      : half_(half + a.first * a.cache.head_dim), walk_(a.cache, a.table), left_(a.context),
        lines_((a.end - a.first) * a.cache.head_dim / 32), steps_(steps) {
    tile();
    while (tokens_) line();
  }

  // Begins with the next tile.
  void tile() {
    tokens_ = std::min(TILE, left_);
    left_ -= tokens_;
    line_ = 0;
    per_step_ = (tokens_ * lines_ + steps_ - 1) / steps_;
  }

  // One of the steps in which it is fetched.
  void step() {
    for (int i = 0; i < per_step_ && tokens_; ++i) line();
  }

 private:
  void line() {
    if (line_ == 0) at_ = half_ + walk_.next();
    _mm_prefetch(reinterpret_cast<const char*>(at_ + 32 * line_), _MM_HINT_T0);
    if (++line_ == lines_) line_ = 0, --tokens_;
  }

  const bf16* half_;
  Walk walk_;
  int left_, lines_, steps_;
  int tokens_ = 0, line_ = 0, per_step_ = 0;
  const bf16* at_ = nullptr;
};

// Attention of GROUP of the query heads of each KV head, `skip` after its first. All heads take a tile of the cache
// together, since there they lie side by side. Every sum has one order, whatever runs beside it.
template <int CHUNKS, int GROUP>
inline void attend(const Query& a, int skip) {
  constexpr int head_dim = CHUNKS * 32;
  const int tiles = tiles_of(a.context), padded = TILE * tiles, heads = a.end - a.first;
  const auto query = [&](int head, int g) { return a.q + ((a.first + head) * a.group + skip + g) * head_dim; };
  const auto scores = [&](int head, int g) { return a.scores + (head * GROUP + g) * padded; };
  const auto tokens_in = [&](int tile) { return std::max(0, std::min(TILE, a.context - tile * TILE)); };

  Walk keys(a.cache, a.table);
  Fetch keys_ahead(a, a.cache.k, heads * GROUP);
  for (int tile = 0; tile < tiles; ++tile) {
    keys_ahead.tile();
    const bf16* k[TILE];
    for (int i = 0; i < TILE; ++i) k[i] = i < tokens_in(tile) ? a.cache.k + keys.next() + a.first * head_dim : k[0];
    for (int head = 0; head < heads; ++head)
      for (int g = 0; g < GROUP; ++g) {
        keys_ahead.step();
        const bf16* q = query(head, g);
        __m512 acc[TILE];
#pragma GCC unroll 16
        for (int i = 0; i < TILE; ++i) {
          acc[i] = _mm512_setzero_ps();
          for (int c = 0; c < CHUNKS; ++c)
            acc[i] = _mm512_dpbf16_ps(acc[i], pairs(k[i] + head * head_dim + 32 * c), pairs(q + 32 * c));
        }
        _mm512_storeu_ps(scores(head, g) + tile * TILE, _mm512_mul_ps(sums_of_16(acc), _mm512_set1_ps(a.scale)));
      }
  }

  float* totals = a.scores + heads * GROUP * padded;  // [heads, GROUP, head_dim]
  Walk values(a.cache, a.table);
  Fetch values_ahead(a, a.cache.v, heads * TILE / 2);
  float* inverse = totals + heads * GROUP * head_dim;
  for (int i = 0; i < heads * GROUP; ++i) inverse[i] = softmax(scores(0, i), a.context);
  std::memset(totals, 0, static_cast<size_t>(heads) * GROUP * head_dim * sizeof(float));
  for (int tile = 0; tile < tiles; ++tile) {
    values_ahead.tile();
    const bf16* v[TILE];
    // What lies beyond the context has a weight of 0.
    for (int i = 0; i < TILE; ++i) v[i] = i < tokens_in(tile) ? a.cache.v + values.next() + a.first * head_dim : v[0];
    for (int head = 0; head < heads; ++head) {
      __m512 sum[GROUP][2 * CHUNKS];
      float* total = totals + head * GROUP * head_dim;
      for (int g = 0; g < GROUP; ++g)
        for (int c = 0; c < 2 * CHUNKS; ++c) sum[g][c] = _mm512_loadu_ps(total + g * head_dim + 16 * c);
      // Two tokens at a time: their values side by side make the pairs that the dot product takes.
      for (int i = 0; i < TILE; i += 2) {
        values_ahead.step();
        __m512bh weights[GROUP];
        for (int g = 0; g < GROUP; ++g) weights[g] = broadcast_pair(probabilities(scores(head, g)) + tile * TILE + i);
        for (int c = 0; c < CHUNKS; ++c) {
          const __m512i x = _mm512_loadu_si512(v[i] + head * head_dim + 32 * c);
          const __m512i y = _mm512_loadu_si512(v[i + 1] + head * head_dim + 32 * c);
          const __m512bh low = as_pairs(_mm512_unpacklo_epi16(x, y)), high = as_pairs(_mm512_unpackhi_epi16(x, y));
          for (int g = 0; g < GROUP; ++g) {
            sum[g][2 * c] = _mm512_dpbf16_ps(sum[g][2 * c], low, weights[g]);
            sum[g][2 * c + 1] = _mm512_dpbf16_ps(sum[g][2 * c + 1], high, weights[g]);
          }
        }
      }
      for (int g = 0; g < GROUP; ++g)
        for (int c = 0; c < 2 * CHUNKS; ++c) _mm512_storeu_ps(total + g * head_dim + 16 * c, sum[g][c]);
    }
  }

  // Unpacking has put the values of each 8 dimensions half into one sum and half into the other.
  const __m512i even = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i odd = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int head = 0; head < heads; ++head)
    for (int g = 0; g < GROUP; ++g) {
      const float* total = totals + (head * GROUP + g) * head_dim;
      bf16* to = a.out + ((a.first + head) * a.group + skip + g) * head_dim;
      const __m512 factor = _mm512_set1_ps(inverse[head * GROUP + g]);
      for (int c = 0; c < CHUNKS; ++c) {
        const __m512 low = _mm512_loadu_ps(total + 32 * c), high = _mm512_loadu_ps(total + 32 * c + 16);
        store_bf16(to + 32 * c, _mm512_mul_ps(_mm512_permutex2var_ps(low, even, high), factor));
        store_bf16(to + 32 * c + 16, _mm512_mul_ps(_mm512_permutex2var_ps(low, odd, high), factor));
      }
    }
}

constexpr int MOST_GROUP = 4;

// As above for all query heads, as many of a KV head at a time as the registers hold.
template <int CHUNKS>
inline void attend_all(const Query& a) {
  constexpr int most = CHUNKS <= 2 ? MOST_GROUP : 2;
  for (int skip = 0; skip < a.group;) {
    const int now = std::min(most, a.group - skip);
    switch (now) {
      case 1: attend<CHUNKS, 1>(a, skip); break;
      case 2: attend<CHUNKS, 2>(a, skip); break;
      case 3: if constexpr (most > 2) attend<CHUNKS, 3>(a, skip); break;
      case 4: if constexpr (most > 2) attend<CHUNKS, 4>(a, skip); break;
    }
    skip += now;
  }
}

}  // namespace ee
