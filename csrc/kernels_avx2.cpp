// The kernels for x86-64 processors with AVX2 and FMA.
#if defined(__x86_64__)

#include <cmath>
#include <cstdint>
#include <new>

#include "contract.h"

// After the standard headers: their inline functions must stay runnable everywhere.
#pragma GCC target("avx2,fma")

#define SPECKER_INLINE [[gnu::always_inline]] static inline
#define SPECKER_HAS_FMA 1

namespace specker {

#include "kernels.h"

const Kernels& avx2_kernels() {
  static const Kernels kernels = {"avx2", verify_sequence, sample_sequence, weigh};
  return kernels;
}

}  // namespace specker

#endif
