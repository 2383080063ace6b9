// What a single reading of a shard finds, and how far its entries may be from its reference.

// By how many powers of two an entry may exceed the reference: shifted by 64, the sums of such weights stay finite.
constexpr float LARGEST_EXPONENT = 48.0f;
// By how many it may fall short: 2^-160 rounds to 0, and a shift by 64 keeps it normal.
constexpr float LOWEST_EXPONENT = 160.0f;
// Exponents from here on leave too few bits beside them.
constexpr float WIDEST_EXPONENT = 0x1p17f;

// What weights are relative to: 2^exponent.
struct Reference {
  float exponent;
  bool positive;  // the value it was chosen by is
};

struct ShardSum {
  float largest;     // NaN where a second reading found the shard to make its row invalid
  double reference;  // the value that the mass is relative to
  double mass;
};
