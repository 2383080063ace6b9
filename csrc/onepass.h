// Sum of a shard's weights, its largest value and its validity in one reading.
//
// The weights are relative to a power of two near the largest weight of the shard's first chunk, which is known before
// the rest is read: the exponent is an integer, so no entry has a reference subtracted from it. Where a later entry
// exceeds it by far, or the chunk is -inf, the shard is measured first and summed in a second reading.

// By how many powers of two an entry may exceed the reference: shifted by 64, eight such weights stay finite.
constexpr float LARGEST_EXPONENT = 48.0f;
// By how many it may fall short: 2^-160 rounds to 0, and a shift by 64 keeps it normal.
constexpr float LOWEST_EXPONENT = 160.0f;
constexpr float WIDEST_EXPONENT = 0x1p20f;
constexpr int64_t HALF = LANES / 2;

// Entries come in pairs: two of 16 bits make one load, and the sum's lanes are those of the pairs.
struct FloatSource {
  // The low bits of a payload are added to the exponent and may turn NaN into a number.
  static constexpr bool CHECKS = true;
  const float* values;
  SPECKER_INLINE void pair(const float* at, int64_t lane, float* first, float* second) {
    *first = at[lane], *second = at[HALF + lane];
  }
};

struct Bfloat16Source {
  static constexpr bool CHECKS = false;
  const uint16_t* values;
  SPECKER_INLINE void pair(const uint16_t* at, int64_t lane, float* first, float* second) {
    uint32_t word;
    __builtin_memcpy(&word, at + 2 * lane, sizeof word);
    *first = float_from_bits(word << 16), *second = float_from_bits(word & 0xffff0000u);
  }
};

struct Float16Source {
  static constexpr bool CHECKS = false;
  const uint16_t* values;
  SPECKER_INLINE void pair(const uint16_t* at, int64_t lane, float* first, float* second) {
    *first = widen_float16(at[lane]), *second = widen_float16(at[HALF + lane]);
  }
};

struct ShardSum {
  float largest;     // NaN where a second reading found the shard to make its row invalid
  double reference;  // the value that the mass is relative to
  double mass;
};

template <class Source>
static float largest_of_chunk(const Source& source) {
  float largest[HALF];
#pragma omp simd
  for (int64_t lane = 0; lane < HALF; ++lane) {
    float most = -__builtin_inff(), other = most;
#pragma GCC unroll 8
    for (int64_t part = 0; part < CHUNK; part += LANES) {
      float first, second;
      Source::pair(source.values + part, lane, &first, &second);
      most = larger(first, most), other = larger(second, other);
    }
    largest[lane] = larger(most, other);
  }
  return largest_lane<HALF>(largest);
}

// Sums relative to 2^exponent. What lies too far below it to weigh is not looked at for the largest value either.
// Returns false where an entry is no number or exceeds the reference by far.
template <class Source>
static bool sum_relative_to(float exponent, const Source& source, int64_t padded, const ExponentialScale scale,
                            ShardSum* whole) {
  const float magic = MAGIC - exponent, lowest = (exponent - LOWEST_EXPONENT) / scale.high;
  float largest[LANES], checks[HALF];
  double lanes[LANES] = {};
  for (int64_t lane = 0; lane < LANES; ++lane) largest[lane] = lowest;
  for (int64_t lane = 0; lane < HALF; ++lane) checks[lane] = 0.0f;
  for (int64_t begin = 0; begin < padded; begin += CHUNK) {
#pragma omp simd
    for (int64_t lane = 0; lane < HALF; ++lane) {
      float most = largest[lane], other = largest[HALF + lane], check = checks[lane], sum = 0.0f, rest = 0.0f;
#pragma GCC unroll 8
      for (int64_t part = 0; part < CHUNK; part += LANES) {
        float first, second;
        Source::pair(source.values + begin + part, lane, &first, &second);
        first = larger(lowest, first), second = larger(lowest, second);
        most = larger(first, most), other = larger(second, other);
        if (Source::CHECKS) check += first + second;
        sum += shifted_power(first, scale, magic), rest += shifted_power(second, scale, magic);
      }
      largest[lane] = most, largest[HALF + lane] = other, checks[lane] = check;
      lanes[lane] += static_cast<double>(sum), lanes[HALF + lane] += static_cast<double>(rest);
    }
  }
  whole->largest = largest_lane<LANES>(largest);
  whole->mass = sum_of_lanes<LANES>(lanes) * EXPONENT_SHIFT;
  const float check = sum_of_lanes<HALF>(checks);
  return whole->largest * scale.high - exponent <= LARGEST_EXPONENT && check == check && whole->mass >= 0.0;
}

// The value whose weight is 2^exponent.
static inline double reference_of(float exponent, const Law& law) {
  return static_cast<double>(exponent) * 0.69314718055994530942 * law.temperature;
}

// The power of two nearest to the weight of a value, where such weights are exponentials and the power is not too wide.
static inline bool exponent_of(const Law& law, float value, float* exponent) {
  *exponent = __builtin_rintf(value * law.scale.high);
  return law.weighing == Weighing::EXPONENTIAL && *exponent > -WIDEST_EXPONENT && *exponent < WIDEST_EXPONENT;
}

template <class Source>
static bool sum_source(const Source& source, int64_t padded, const Law& law, ShardSum* sum, float* exponent) {
  if (!exponent_of(law, largest_of_chunk(source), exponent)) return false;
  sum->reference = reference_of(*exponent, law);
  return sum_relative_to(*exponent, source, padded, law.scale, sum);
}

// Whether entries of 16 bits are widened as they are read; only a chunk that is not whole has to be padded in a buffer.
static inline bool reads_pairs(const Row& row) { return row.dtype != DType::FLOAT32 && !row.adjusts(); }

// Sums whole chunks as they are read, and the entries behind them from a buffer.
template <class Source>
static bool sum_pairs(const Row& row, const Source& source, int64_t begin, int64_t count, const Law& law, float* buffer,
                      ShardSum* sum) {
  const int64_t rest = count % CHUNK, whole = count - rest;
  float exponent;
  if (!sum_source(source, whole, law, sum, &exponent)) return false;
  if (rest == 0) return true;
  const Entries entries = load_entries(row, begin + whole, begin + count, buffer);
  ShardSum last;
  if (!sum_relative_to(exponent, FloatSource{entries.values}, CHUNK, law.scale, &last)) return false;
  sum->mass += last.mass;
  sum->largest = larger(sum->largest, last.largest);
  return true;
}

// Sums a shard of logits; returns false where that takes a second reading.
static bool sum_in_one_reading(const Row& row, const Law& law, int64_t shard, float* buffer, ShardSum* sum) {
  const int64_t begin = shard * SHARD, count = begin + SHARD < row.vocab ? SHARD : row.vocab - begin;
  if (!reads_pairs(row) || count < CHUNK) {
    const Entries entries = load_shard(row, shard, buffer);
    float exponent;
    return sum_source(FloatSource{entries.values}, entries.padded, law, sum, &exponent);
  }
  // The hardware fetches a row that is read in order; prefetching it by hand into the 32 KiB of an L1 cache only cost.
  const uint16_t* values = reinterpret_cast<const uint16_t*>(row.data) + begin;
  if (row.dtype == DType::BFLOAT16) return sum_pairs(row, Bfloat16Source{values}, begin, count, law, buffer, sum);
  return sum_pairs(row, Float16Source{values}, begin, count, law, buffer, sum);
}
