// Philox-4x32-10 (Salmon et al. 2011): stateless uniforms, bit-equal on every backend.

struct Uniforms {
  double accept;
  double emission;
};

static inline double uniform_from_words(uint32_t low, uint32_t high) {
  const uint64_t word = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<double>(word >> 11) * 0x1p-53;
}

// Key: the sequence's seed. Counter: (position low, position high, purpose, 0).
static inline Uniforms philox_uniforms(uint64_t seed, uint64_t position, uint32_t purpose) {
  uint32_t words[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), purpose, 0};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(words[0]) * 0xD2511F53u;
    const uint64_t product2 = static_cast<uint64_t>(words[2]) * 0xCD9E8D57u;
    words[0] = static_cast<uint32_t>(product2 >> 32) ^ words[1] ^ key0;
    words[2] = static_cast<uint32_t>(product0 >> 32) ^ words[3] ^ key1;
    words[1] = static_cast<uint32_t>(product2);
    words[3] = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {uniform_from_words(words[0], words[1]), uniform_from_words(words[2], words[3])};
}
