// Vector helpers for bfloat16: 16 floats or 32 bfloat16 a register. Needs AVX-512 F, BW, VL, DQ and BF16.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace ee {

using bf16 = uint16_t;

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline __m512 load_bf16(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1); }

inline __m512 load_bf16(const bf16* p, __mmask16 lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, p)); }

// Round to nearest even. NaN stays NaN.
inline __m256i narrow(__m512 x) {
  __m256bh y = _mm512_cvtneps_pbh(x);
  __m256i z;
  std::memcpy(&z, &y, sizeof z);
  return z;
}

inline void store_bf16(bf16* p, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }

inline void store_bf16(bf16* p, __m512 x, __mmask16 lanes) { _mm256_mask_storeu_epi16(p, lanes, narrow(x)); }

inline __m512bh pairs(const void* p) {
  __m512i x = _mm512_loadu_si512(p);
  __m512bh y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline __m512bh as_pairs(__m512i x) {
  __m512bh y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline __m512bh broadcast_pair(const bf16* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof x);
  return as_pairs(_mm512_set1_epi32(x));
}

// e^x to about 2 units in the last place of float32: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes' expf).
// NaN gives NaN, -inf gives 0.
inline __m512 exp_ps(__m512 x) {
  const __m512 low = _mm512_set1_ps(-104.0f), high = _mm512_set1_ps(89.0f);
  // The operand order of max and min lets NaN through.
  __m512 c = _mm512_min_ps(high, _mm512_max_ps(low, x));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(c, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), c);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

inline __m512 silu(__m512 x) {
  __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

}  // namespace ee
