// Included before every source of an AddressSanitizer build: fences behind the arrays that share one allocation.
#pragma once

#include <sanitizer/asan_interface.h>

#include <cstdint>

// Sixteen bytes, and on to where AddressSanitizer's account of memory can begin anew.
#define SPECKER_FENCE_BYTES 24

static inline char* specker_fence(char* end) {
  char* next = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(end) + SPECKER_FENCE_BYTES) / 8 * 8);
  ASAN_POISON_MEMORY_REGION(end, static_cast<size_t>(next - end));
  return next;
}
#define SPECKER_FENCE(end) specker_fence(end)
