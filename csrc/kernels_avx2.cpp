// The kernels for x86-64 processors with AVX2 and FMA.
#if defined(__x86_64__)

#include <cmath>
#include <cstdint>
#include <new>

#include <immintrin.h>

#include "contract.h"

// After the standard headers: their inline functions must stay runnable everywhere.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define SPECKER_INLINE [[gnu::always_inline]] static inline
#define SPECKER_HAS_FMA 1

namespace specker {
namespace {

#include "lanes_avx2.h"

}  // namespace

#include "kernels.h"

const Kernels& avx2_kernels() {
  static const Kernels kernels = {"avx2", verify_sequence, sample_sequence, weigh};
  return kernels;
}

}  // namespace specker

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
