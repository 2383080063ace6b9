// Which build of the kernels serves this processor.
#pragma once

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "contract.h"

namespace specker {

#if defined(__x86_64__)
// Clang's __builtin_cpu_supports does not know F16C.
inline bool supports_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

inline bool supports_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && supports_f16c();
#else
  return false;
#endif
}

inline bool supports_avx512() {
#if defined(__x86_64__)
  return supports_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

inline const Kernels& kernels_of(const char* capability) {
#if defined(__x86_64__)
  if (!std::strcmp(capability, "avx512") && supports_avx512()) return avx512_kernels();
  if (!std::strcmp(capability, "avx2") && supports_avx2()) return avx2_kernels();
#endif
  if (!std::strcmp(capability, "default")) return default_kernels();
  throw std::runtime_error(std::string("SPECKER_CPU_CAPABILITY: expected avx512, avx2 or default, of those that this "
                                       "processor supports, got ") +
                           capability);
}

// SPECKER_CPU_CAPABILITY decides, read once; without it the best that the processor supports.
inline const Kernels& chosen_kernels() {
  static const Kernels& kernels = [&]() -> const Kernels& {
    const char* wanted = std::getenv("SPECKER_CPU_CAPABILITY");
    if (wanted && *wanted) return kernels_of(wanted);
    return kernels_of(supports_avx512() ? "avx512" : supports_avx2() ? "avx2" : "default");
  }();
  return kernels;
}

}  // namespace specker
