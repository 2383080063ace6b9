// The kernels for x86-64 processors with AVX-512.
#if defined(__x86_64__)

#include <cmath>
#include <cstdint>
#include <new>

#include <immintrin.h>

#include "contract.h"

// After the standard headers: their inline functions must stay runnable everywhere.
#if defined(__clang__)
#pragma clang attribute push(                                                       \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), \
    apply_to = function)
#pragma clang attribute push(__attribute__((min_vector_width(512))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

#if !defined(__clang__)
// The intrinsics of GCC 12 start from a register that they leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define SPECKER_INLINE [[gnu::always_inline]] static inline
#define SPECKER_HAS_FMA 1

namespace specker {
namespace {

#include "lanes_avx512.h"

// The compiler has no plain loop for what one instruction does: moving the chosen entries together.
constexpr int64_t COMPRESSED = 16;

SPECKER_INLINE int64_t compress(const float* values, float floor, float ceiling, float* out) {
  const __m512 loaded = _mm512_loadu_ps(values);
  const __mmask16 above = _mm512_cmp_ps_mask(loaded, _mm512_set1_ps(floor), _CMP_GE_OQ);
  const __mmask16 hits = _mm512_mask_cmp_ps_mask(above, loaded, _mm512_set1_ps(ceiling), _CMP_LE_OQ);
  // By way of a register: a compressing store is slow on some processors.
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps(hits, loaded));
  return __builtin_popcount(hits);
}

}  // namespace

#define SPECKER_COMPRESS compress
#include "kernels.h"

const Kernels& avx512_kernels() {
  static const Kernels kernels = {"avx512", verify_sequence, sample_sequence, weigh};
  return kernels;
}

}  // namespace specker

#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute pop
#endif

#endif
