// Sum of a shard's weights, its largest value and its validity in one reading.
//
// The weights are relative to a power of two near the largest weight of the shard's first entries, which is known
// before the rest is read: the exponent is an integer, so no entry has a reference subtracted from it. Where a later
// entry exceeds it by far, or the first are -inf, the shard is measured first and summed in a second reading.

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
  const float largest = largest_of_sample(source);
  if (!exponent_of(law, largest, exponent)) return false;
  sum->reference = reference_of(*exponent, law);
  return sum_relative_to(*exponent, largest > 0.0f, source, padded, law.scale, sum);
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
  if (!sum_relative_to(exponent, false, FloatSource{entries.values}, CHUNK, law.scale, &last)) return false;
  sum->mass += last.mass;
  sum->largest = larger(sum->largest, last.largest);
  return true;
}

// Sums a shard of logits; returns false where that takes a second reading.
static bool sum_in_one_reading(const Row& row, const Law& law, int64_t shard, float* buffer, ShardSum* sum) {
  if (law.weighing != Weighing::EXPONENTIAL) return false;
  const int64_t begin = shard * SHARD, count = begin + SHARD < row.vocab ? SHARD : row.vocab - begin;
  if (!reads_pairs(row) || count < CHUNK) {
    const Entries entries = load_shard(row, shard, buffer);
    float exponent;
    return sum_source(FloatSource{entries.values}, entries.padded, law, sum, &exponent);
  }
  const uint16_t* values = reinterpret_cast<const uint16_t*>(row.data) + begin;
  if (row.dtype == DType::BFLOAT16) return sum_pairs(row, Bfloat16Source{values}, begin, count, law, buffer, sum);
  return sum_pairs(row, Float16Source{values}, begin, count, law, buffer, sum);
}
