// What a single reading of a shard finds, and how far its entries may be from its reference.

// By how many powers of two an entry may exceed the reference: shifted by 64, the sums of such weights stay finite.
constexpr float LARGEST_EXPONENT = 48.0f;
// By how many it may fall short: 2^-160 rounds to 0, and a shift by 64 keeps it normal.
constexpr float LOWEST_EXPONENT = 160.0f;
// Entries whose largest value gives the reference.
constexpr int64_t SAMPLE = 256;
// A bound of so many powers, cut off to the 8 bits of bfloat16, is off by at most 32, which powers of 2^-160 still bear.
constexpr float WIDEST_EXPONENT = 0x1p12f;

struct ShardSum {
  float largest;     // NaN where a second reading found the shard to make its row invalid
  double reference;  // the value that the mass is relative to
  double mass;
};

// What lies above and below a bracket of values.
struct Bracket {
  float low;
  float high;
};

struct SplitMass {
  double above;
  double below;
};
