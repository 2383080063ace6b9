// Random numbers, and memory in which a sanitizer sees every stray access.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "contract.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, size) (static_cast<void>(begin), static_cast<void>(size))
#endif

namespace specker {

// SplitMix64: the same calls on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t word = state_ += 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  bool chance(double probability) { return uniform() < probability; }
  int64_t below(int64_t limit) { return static_cast<int64_t>(next() % static_cast<uint64_t>(limit)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  // Near enough to a normal number for logits.
  double bell() { return (uniform() + uniform() + uniform() + uniform() - 2.0) * 1.7; }

  template <class Element>
  Element pick(std::initializer_list<Element> options) {
    return options.begin()[below(static_cast<int64_t>(options.size()))];
  }

 private:
  uint64_t state_;
};

// Blocks of exactly the wanted size, so that the byte behind the last element is out of bounds.
class Memory {
 public:
  template <class Element>
  Element* allocate(int64_t count) {
    // Tensors without elements have no memory.
    if (count == 0) return nullptr;
    blocks_.emplace_back(std::malloc(static_cast<size_t>(count) * sizeof(Element)), std::free);
    return static_cast<Element*>(blocks_.back().get());
  }

  template <class Element>
  Element* copy(const std::vector<Element>& values) {
    Element* block = allocate<Element>(static_cast<int64_t>(values.size()));
    if (block) std::memcpy(block, values.data(), values.size() * sizeof(Element));
    return block;
  }

 private:
  std::vector<std::unique_ptr<void, void (*)(void*)>> blocks_;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Rounds towards zero: which neighbour it becomes does not matter here.
inline uint16_t narrow_to_float16(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return 0x7e00;
  if (magnitude == 0x7f800000u) return sign | 0x7c00;
  if (magnitude >= 0x477fe000u) return sign | 0x7bff;
  if (magnitude < 0x38800000u) {
    float absolute;
    std::memcpy(&absolute, &magnitude, sizeof absolute);
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(absolute * 0x1p24f));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u) >> 13));
}

inline void store(char* row, int64_t index, DType dtype, float value) {
  if (dtype == DType::FLOAT32) {
    std::memcpy(row + index * 4, &value, 4);
    return;
  }
  const uint16_t bfloat16 = value != value ? 0x7fc0 : static_cast<uint16_t>(bits_of(value) >> 16);
  const uint16_t half = dtype == DType::BFLOAT16 ? bfloat16 : narrow_to_float16(value);
  std::memcpy(row + index * 2, &half, 2);
}

}  // namespace specker
