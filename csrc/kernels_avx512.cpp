// The kernels for x86-64 processors with AVX-512.
#if defined(__x86_64__)

#include <cmath>
#include <cstdint>
#include <new>

#include "contract.h"

// After the standard headers: their inline functions must stay runnable everywhere.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"), min_vector_width(512))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#endif

#define SPECKER_INLINE [[gnu::always_inline]] static inline
#define SPECKER_HAS_FMA 1

namespace specker {

#include "kernels.h"

const Kernels& avx512_kernels() {
  static const Kernels kernels = {"avx512", verify_sequence, sample_sequence, weigh};
  return kernels;
}

}  // namespace specker

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
