// A transformer layer on a flat, ragged set of tokens, in bfloat16 on a CPU with AVX-512 BF16. Its reference is
// `eeinfer.model.decoder.Decoder._layer`. Called through ctypes; the structures have twins in `kernels.py`.

#include <chrono>
#include <cmath>

#include "attention_work.h"
#include "bf16.h"
#include "gate.h"
#include "linear.h"
#include "scratch.h"
#include "shapes.h"
#include "stats.h"
#include "threads.h"

namespace ee {

// Packed matrices; biases and head norms are null where the model has none.
struct LayerWeights {
  const bf16 *attention_norm, *mlp_norm, *qkv, *output, *gate_up, *down;
  const bf16 *qkv_bias, *output_bias, *gate_up_bias, *down_bias, *q_norm, *k_norm;
};

inline void rms_norm(const bf16* x, const bf16* gain, int size, float eps, bf16* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < size; i += 16) {
    const __m512 v = load_bf16(x + i, first_lanes(size - i));
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + eps));
  for (int i = 0; i < size; i += 16) {
    const __mmask16 lanes = first_lanes(size - i);
    __m512 v = _mm512_mul_ps(load_bf16(x + i, lanes), factor);
    if (gain) v = _mm512_mul_ps(v, load_bf16(gain + i, lanes));
    store_bf16(out + i, v, lanes);
  }
}

// Rotates the pairs (x[i], x[i + head_dim / 2]).
inline void rotate(bf16* x, int head_dim, const float* cos, const float* sin) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 16) {
    const __mmask16 lanes = first_lanes(half - i);
    const __m512 c = _mm512_maskz_loadu_ps(lanes, cos + i), s = _mm512_maskz_loadu_ps(lanes, sin + i);
    const __m512 a = load_bf16(x + i, lanes), b = load_bf16(x + half + i, lanes);
    store_bf16(x + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), lanes);
    store_bf16(x + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)), lanes);
  }
}

// Norm and rotation of the heads of one token's k, then k and v into the cache.
inline void store_kv(const Sizes& sizes, bf16* k, const bf16* v, const bf16* k_norm, const float* cos, const float* sin,
                     const CacheView& cache, int64_t slot) {
  for (int head = 0; head < sizes.kv_heads; ++head) {
    bf16* own = k + head * sizes.head_dim;
    if (k_norm) rms_norm(own, k_norm, sizes.head_dim, sizes.eps, own);
    rotate(own, sizes.head_dim, cos, sin);
  }
  const size_t at = static_cast<size_t>(slot) * cache.stride(), bytes = cache.stride() * sizeof(bf16);
  std::memcpy(cache.k + at, k, bytes);
  std::memcpy(cache.v + at, v, bytes);
}

// Nanoseconds of thread 0 in the parts of a layer.
struct Times {
  int64_t linear, attention, rest;
};

class Clock {
 public:
  explicit Clock(Times* times) : times_(times) { if (times) last_ = now(); }
  void lap(int64_t Times::*part) {
    if (!times_) return;
    const int64_t here = now();
    times_->*part += here - last_;
    last_ = here;
  }

 private:
  static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
  Times* times_;
  int64_t last_ = 0;
};

}  // namespace ee

using namespace ee;

extern "C" {

int64_t ee_packed_size(int columns, int inputs) { return panels_of(columns) * static_cast<int64_t>(panel_size(inputs)); }

void ee_pack(const bf16* w, int columns, int inputs, bf16* out) { pack(w, columns, inputs, out); }

// Some rows of a matrix that was packed, as they were: out [count, inputs].
void ee_packed_rows(const bf16* packed, int inputs, const int64_t* rows, int count, bf16* out, int threads) {
  Team& crew = Team::get();
  const auto claimed = crew.claim();
  crew.run(count < 16 ? 1 : threads, [&](int thread, int team, Barrier&) {  // a few are read before a thread wakes
    const Share own(count, thread, team);
    for (int i = own.begin; i < own.end; ++i)
      packed_row(packed, inputs, rows[i], out + static_cast<size_t>(i) * inputs);
  });
}

// gate and up, [width, inputs] each, 16 columns of one and the same 16 of the other in a panel.
void ee_pack_gate_up(const bf16* gate, const bf16* up, int width, int inputs, bf16* out) {
  for (int start = 0; start < width; start += 16)
    for (int k = 0; k < inputs; k += 2)
      for (const bf16* half : {gate, up})
        for (int c = start; c < start + 16; ++c) {
          const bf16* from = half + static_cast<size_t>(c) * inputs + k;
          *out++ = c < width ? from[0] : 0;
          *out++ = c < width ? from[1] : 0;
        }
}

// out [rows, columns] = x [rows, inputs] W^T.
void ee_linear(const bf16* x, int rows, int inputs, const bf16* packed, int columns, const bf16* bias, bf16* out,
               int threads) {
  Team& crew = Team::get();
  const auto claimed = crew.claim();
  crew.run(threads, [&](int thread, int team, Barrier&) {
    linear(x, rows, inputs, packed, Share(panels_of(columns), thread, team), Store{out, columns, bias, columns});
  });
}

// K (rotated) and V, [layers, count, kv_heads, head_dim] each, that consecutive layers make of the same hidden states.
void ee_project_kv(const Sizes* s, const LayerWeights* layers, int num_layers, const bf16* hidden, int n, const float* cos,
                   const float* sin, bf16* k, bf16* v, int threads) {
  Team& crew = Team::get();
  const auto claimed = crew.claim();
  static Scratch scratch;
  const int d = s->hidden, q_size = s->heads * s->head_dim, kv_size = s->kv_heads * s->head_dim;
  bf16* normed = scratch.take<bf16>(static_cast<size_t>(n) * d * num_layers);
  crew.run(threads, [&](int thread, int team, Barrier& barrier) {
    const Share norms(n * num_layers, thread, team);
    for (int i = norms.begin; i < norms.end; ++i)
      rms_norm(hidden + static_cast<size_t>(i % n) * d, layers[i / n].attention_norm, d, s->eps, normed + static_cast<size_t>(i) * d);
    barrier.wait();
    const int panels = 2 * kv_size / PANEL;
    const Share own(num_layers * panels, thread, team);
    for (int item = own.begin; item < own.end; ++item) {
      const LayerWeights& w = layers[item / panels];
      const int column = item % panels * PANEL;  // among K and V
      const bool is_k = column < kv_size;
      bf16* out = (is_k ? k : v) + static_cast<size_t>(item / panels) * n * kv_size + column % kv_size;
      const bf16* bias = w.qkv_bias ? w.qkv_bias + q_size + column : nullptr;
      linear(normed + static_cast<size_t>(item / panels) * n * d, n, d, w.qkv + (q_size + column) / PANEL * panel_size(d), Share(1, 0, 1),
             Store{out, PANEL, bias, kv_size});
    }
    barrier.wait();
    const Share rows(n * num_layers, thread, team);
    for (int i = rows.begin; i < rows.end; ++i)
      for (int head = 0; head < s->kv_heads; ++head) {
        bf16* own_k = k + static_cast<size_t>(i) * kv_size + head * s->head_dim;
        if (const bf16* gain = layers[i / n].k_norm) rms_norm(own_k, gain, s->head_dim, s->eps, own_k);
        rotate(own_k, s->head_dim, cos + static_cast<size_t>(i % n) * s->head_dim / 2, sin + static_cast<size_t>(i % n) * s->head_dim / 2);
      }
  });
}

// One layer: hidden [count, hidden] to out, K and V of the tokens written into the layer's cache.
void ee_layer(const Sizes* s, const LayerWeights* w, const Tokens* t, bf16* k_cache, bf16* v_cache, const bf16* hidden,
              bf16* out, int threads, Times* times) {
  Team& crew = Team::get();
  const auto claimed = crew.claim();
  static Scratch scratch;
  const int n = t->count, d = s->hidden, f = s->intermediate;
  const int q_size = s->heads * s->head_dim, kv_size = s->kv_heads * s->head_dim, qkv_size = q_size + 2 * kv_size;
  bf16* normed = scratch.take<bf16>(static_cast<size_t>(n) * (2 * d + q_size + qkv_size + f) + 64);
  bf16* qkv = normed + static_cast<size_t>(n) * d;
  bf16* attended = qkv + static_cast<size_t>(n) * qkv_size;
  bf16* middle = attended + static_cast<size_t>(n) * q_size;
  bf16* inner = middle + static_cast<size_t>(n) * d;
  const CacheView cache{k_cache, v_cache, t->block_size, s->kv_heads, s->head_dim};
  AttentionWork attention(*s, cache, *t, qkv, qkv_size, attended);
  crew.run(threads, [&](int thread, int team, Barrier& barrier) {
    Clock clock(thread ? nullptr : times);
    const Share rows(n, thread, team);
    for (int i = rows.begin; i < rows.end; ++i)
      rms_norm(hidden + static_cast<size_t>(i) * d, w->attention_norm, d, s->eps, normed + static_cast<size_t>(i) * d);
    barrier.wait();
    clock.lap(&Times::rest);
    linear(normed, n, d, w->qkv, Share(panels_of(qkv_size), thread, team), Store{qkv, qkv_size, w->qkv_bias, qkv_size});
    barrier.wait();
    clock.lap(&Times::linear);
    for (int i = rows.begin; i < rows.end; ++i) {
      bf16* q = qkv + static_cast<size_t>(i) * qkv_size;
      const float *cos = t->cos + static_cast<size_t>(i) * s->head_dim / 2, *sin = t->sin + static_cast<size_t>(i) * s->head_dim / 2;
      for (int head = 0; head < s->heads; ++head) {
        bf16* own = q + head * s->head_dim;
        if (w->q_norm) rms_norm(own, w->q_norm, s->head_dim, s->eps, own);
        rotate(own, s->head_dim, cos, sin);
      }
      store_kv(*s, q + q_size, q + q_size + kv_size, w->k_norm, cos, sin, cache, t->slots[i]);
    }
    barrier.wait();
    clock.lap(&Times::rest);
    attention.run(thread, team);
    barrier.wait();
    clock.lap(&Times::attention);
    linear(attended, n, q_size, w->output, Share(panels_of(d), thread, team), Store{middle, d, w->output_bias, d, hidden});
    barrier.wait();
    clock.lap(&Times::linear);
    for (int i = rows.begin; i < rows.end; ++i)
      rms_norm(middle + static_cast<size_t>(i) * d, w->mlp_norm, d, s->eps, normed + static_cast<size_t>(i) * d);
    barrier.wait();
    clock.lap(&Times::rest);
    linear(normed, n, d, w->gate_up, Share((f + 15) / 16, thread, team),
           GatedSilu{inner, f, w->gate_up_bias, w->gate_up_bias ? w->gate_up_bias + f : nullptr});
    barrier.wait();
    linear(inner, n, f, w->down, Share(panels_of(d), thread, team), Store{out, d, w->down_bias, d, middle});
    barrier.wait();
    clock.lap(&Times::linear);
  });
}

// Probabilities [rows] that the rows of hidden [rows, hidden] may leave.
void ee_gate(const Gate* gate, const bf16* hidden, int rows, float* out, int threads) {
  Team& crew = Team::get();
  const auto claimed = crew.claim();
  static Scratch scratch;
  const size_t n = rows, width = gate->width, tokens = gate->tokens;
  float* brought = scratch.take<float>(n * (2 * width + tokens + (width + 1) / 2));
  float* inner = brought + n * width;
  float* scores = inner + n * width;
  bf16* u = reinterpret_cast<bf16*>(scores + n * tokens);
  crew.run(threads, [&](int thread, int team, Barrier& barrier) {
    linear(hidden, rows, gate->hidden, gate->down, Share(panels_of(gate->width), thread, team), StoreFloat{brought, gate->width, nullptr});
    barrier.wait();
    const Share own(rows, thread, team);
    for (int row = own.begin; row < own.end; ++row) normed(brought + row * width, gate->width, gate->eps, u + row * width);
    barrier.wait();
    linear(u, rows, gate->width, gate->shortlist, Share(panels_of(gate->tokens), thread, team), StoreFloat{scores, gate->tokens, gate->shortlist_bias});
    linear(u, rows, gate->width, gate->inner, Share(panels_of(gate->width), thread, team), StoreFloat{inner, gate->width, gate->inner_bias});
    barrier.wait();
    for (int row = own.begin; row < own.end; ++row) out[row] = probability(*gate, scores + row * tokens, inner + row * width);
  });
}

// Statistics of logits [rows, size]: largest, log-sum-exp, second and probability-weighted mean, [rows, 4], and argmax.
// Without `sums` only largest and argmax are set. A row with a NaN has NaN for all.
void ee_logit_stats(const bf16* logits, int rows, int size, bool sums, bool second, bool mean, float* out,
                    int64_t* argmax, int threads) {
  Team& crew = Team::get();
  const auto claimed = crew.claim();
  static Scratch scratch;
  LogitPart* parts = scratch.take<LogitPart>(static_cast<size_t>(rows) * STATS_PARTS);
  crew.run(threads, [&](int thread, int team, Barrier& barrier) {
    const Share items(rows * STATS_PARTS, thread, team);
    for (int i = items.begin; i < items.end; ++i)
      parts[i] = stats_of_part(logits + static_cast<size_t>(i / STATS_PARTS) * size, size, i % STATS_PARTS, sums, second, mean);
    barrier.wait();
    const Share own(rows, thread, team);
    for (int row = own.begin; row < own.end; ++row) {
      LogitPart all = parts[row * STATS_PARTS];
      for (int i = 1; i < STATS_PARTS; ++i) merge(all, parts[row * STATS_PARTS + i]);
      const float nan = std::numeric_limits<float>::quiet_NaN();
      float* to = out + row * 4;
      to[0] = all.nan ? nan : all.largest;
      to[1] = all.nan || !sums ? nan : all.largest + std::log(all.sum);
      to[2] = all.nan || !second ? (second ? nan : -std::numeric_limits<float>::infinity()) : all.second;
      to[3] = all.nan || !mean ? nan : all.largest + all.weighted / all.sum;
      argmax[row] = all.argmax;
    }
  });
}

}  // extern "C"
