// The kernels for any processor: SSE2 on x86-64, NEON on AArch64.
#include <cmath>
#include <cstdint>
#include <new>

#include "contract.h"

#define SPECKER_INLINE [[gnu::always_inline]] static inline
#if defined(__aarch64__) || defined(__FMA__)
#define SPECKER_HAS_FMA 1
#else
#define SPECKER_HAS_FMA 0
#endif

namespace specker {

#include "kernels.h"

const Kernels& default_kernels() {
  static const Kernels kernels = {"default", verify_sequence, sample_sequence, weigh};
  return kernels;
}

}  // namespace specker
