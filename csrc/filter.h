// The thresholds of top-k, top-p and min-p, found without sorting the row.
//
// A threshold is the largest value v such that the entries >= v together reach a wanted measure: a count for top-k, a
// share of the float64 mass for top-p. Where few entries can matter they are gathered and selected from; otherwise a
// histogram over the order of float32 narrows the range first. Its 2048 bins leave at most 2^21 of the 2^32 orders after
// one reading and a single one after three: one statistics reading, one histogram and one gathering are the ordinary
// case, two histograms more the worst.

constexpr int64_t CAPACITY = 2048;
constexpr int64_t BINS = 2048;

// Memory of one filtered row; each sequence uses it for one row at a time.
struct FilterScratch {
  float* block_largest;  // num_blocks(vocab)
  float* candidates;     // candidate_room(vocab)
  double* measures;      // CAPACITY
  double* bins;          // BINS
};

// A block too many is gathered before the overflow is seen.
static inline int64_t candidate_room(int64_t vocab) {
  return (num_blocks(vocab) > CAPACITY ? num_blocks(vocab) : CAPACITY) + BLOCK;
}

struct FilteredRow {
  const Row& row;
  const Law& law;
  double row_max;
  const FilterScratch& scratch;
};

enum class Measured { COUNT, MASS };

static inline uint32_t order_of(float value) {
  // Adding 0 makes -0 and 0 one value.
  const float canonical = value + 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &canonical, sizeof bits);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

static inline float value_of(uint32_t order) {
  return float_from_bits(order ^ (order >> 31 ? 0x80000000u : 0xffffffffu));
}

// The least float32 that is not below a float64.
static inline float ceil_to_float(double value) {
  const float nearest = static_cast<float>(value);
  return static_cast<double>(nearest) < value ? nextafterf(nearest, __builtin_inff()) : nearest;
}

static inline float floor_to_float(double value) {
  const float nearest = static_cast<float>(value);
  return static_cast<double>(nearest) > value ? nextafterf(nearest, -__builtin_inff()) : nearest;
}

static void measure_values(const FilteredRow& row, Measured measured, const float* values, int64_t count, double* out) {
  if (measured == Measured::COUNT) {
    for (int64_t index = 0; index < count; ++index) out[index] = 1.0;
    return;
  }
  if (row.law.weighing != Weighing::EXPONENTIAL) {
    for (int64_t index = 0; index < count; ++index) out[index] = relative_weight(row.law, values[index], row.row_max);
    return;
  }
  const WideExponentialScale scale = wide_exponential_scale(row.law.temperature);
  const double row_max = row.row_max;
#pragma omp simd
  for (int64_t index = 0; index < count; ++index) {
    out[index] = wide_exponential(static_cast<double>(values[index]) - row_max, scale);
  }
}

// Calls body(values, count) for the blocks that hold a value >= floor; body returns false to stop.
template <class Body>
static void for_blocks(const FilteredRow& row, float floor, Body body) {
  alignas(64) float buffer[CHUNK];
  for (int64_t block = 0; block < num_blocks(row.row.vocab); ++block) {
    if (!(row.scratch.block_largest[block] >= floor)) continue;
    const int64_t begin = block * BLOCK;
    const int64_t count = row.row.vocab - begin < BLOCK ? row.row.vocab - begin : BLOCK;
    const float* values = buffer;
    if (row.row.dtype == DType::FLOAT32) {
      values = reinterpret_cast<const float*>(row.row.data) + begin;
    } else {
      widen(row.row, begin, count, buffer);
    }
    if (!body(values, count)) return;
  }
}

// Gathers the values in [floor, ceiling]; returns -1 if there are more than CAPACITY.
static int64_t gather(const FilteredRow& row, float floor, float ceiling) {
  float* candidates = row.scratch.candidates;
  int64_t gathered = 0;
  for_blocks(row, floor, [&](const float* values, int64_t count) {
    for (int64_t index = 0; index < count; ++index) {
      candidates[gathered] = values[index];
      gathered += values[index] >= floor && values[index] <= ceiling;
    }
    return gathered <= CAPACITY;
  });
  return gathered <= CAPACITY ? gathered : -1;
}

static inline float median(float first, float second, float third) {
  const float low = first < second ? first : second;
  const float high = first < second ? second : first;
  return third < low ? low : third > high ? high : third;
}

static inline void swap_entries(float* values, double* measures, int64_t left, int64_t right) {
  const float value = values[left];
  const double measure = measures[left];
  values[left] = values[right], measures[left] = measures[right];
  values[right] = value, measures[right] = measure;
}

// The largest candidate whose entries >= it, with `above` from larger ones, reach `wanted`; else the least candidate.
static float select(float* values, double* measures, int64_t count, double above, double wanted) {
  int64_t begin = 0, end = count;
  while (true) {
    const float pivot = median(values[begin], values[begin + (end - begin) / 2], values[end - 1]);
    // [begin, greater) is above the pivot, [greater, next) equals it, [less, end) is below it.
    int64_t greater = begin, next = begin, less = end;
    double greater_measure = 0.0, equal_measure = 0.0;
    while (next < less) {
      if (values[next] > pivot) {
        greater_measure += measures[next];
        swap_entries(values, measures, greater++, next++);
      } else if (values[next] < pivot) {
        swap_entries(values, measures, next, --less);
      } else {
        equal_measure += measures[next++];
      }
    }
    if (greater > begin && above + greater_measure >= wanted) {
      end = greater;
    } else if (less == end || above + greater_measure + equal_measure >= wanted) {
      return pivot;
    } else {
      above += greater_measure + equal_measure;
      begin = less;
    }
  }
}

static double sum_measures(const double* measures, int64_t count) {
  double sum = 0.0;
  for (int64_t index = 0; index < count; ++index) sum += measures[index];
  return sum;
}

struct OrderRange {
  uint32_t low;
  uint32_t high;

  int shift() const {
    int bits = 0;
    while ((static_cast<uint64_t>(high - low) >> bits) >= BINS) ++bits;
    return bits;
  }
};

// Fills the bins with the measures of the values in range and returns the measure of all values >= floor.
static double fill_bins(const FilteredRow& row, Measured measured, float floor, OrderRange range) {
  double* bins = row.scratch.bins;
  const int shift = range.shift();
  for (int64_t bin = 0; bin < BINS; ++bin) bins[bin] = 0.0;
  double total = 0.0;
  for_blocks(row, floor, [&](const float* values, int64_t count) {
    double measures[BLOCK];
    measure_values(row, measured, values, count, measures);
    for (int64_t index = 0; index < count; ++index) {
      if (!(values[index] >= floor)) continue;
      total += measures[index];
      const uint32_t order = order_of(values[index]);
      if (order >= range.low && order <= range.high) bins[(order - range.low) >> shift] += measures[index];
    }
    return true;
  });
  return total;
}

// Moves `range` to the bin in which the measure reaches `wanted`, and what lies above that bin to `above`.
static OrderRange narrow(const FilteredRow& row, OrderRange range, double wanted, double* above) {
  const int shift = range.shift();
  int64_t bin = static_cast<int64_t>((range.high - range.low) >> shift);
  while (bin > 0 && !(*above + row.scratch.bins[bin] >= wanted)) *above += row.scratch.bins[bin--];
  const uint64_t low = range.low + (static_cast<uint64_t>(bin) << shift);
  const uint64_t high = low + (uint64_t{1} << shift) - 1;
  return {static_cast<uint32_t>(low), high < range.high ? static_cast<uint32_t>(high) : range.high};
}

// Threshold of `wanted` entries, or of the share `wanted` of their mass, among the values >= floor. No threshold is
// below `bound`, which is >= floor: entries below it only count for the whole.
static float find_threshold(const FilteredRow& row, Measured measured, float floor, float bound, double wanted) {
  const float row_max = static_cast<float>(row.row_max);
  OrderRange range = {order_of(bound), order_of(row_max)};
  double above = 0.0;
  int64_t count = gather(row, floor, row_max);
  if (count >= 0) {
    measure_values(row, measured, row.scratch.candidates, count, row.scratch.measures);
    if (measured == Measured::MASS) wanted *= sum_measures(row.scratch.measures, count);
    return select(row.scratch.candidates, row.scratch.measures, count, above, wanted);
  }
  for (bool first = true; range.low < range.high; first = false) {
    const double total = fill_bins(row, measured, first ? floor : value_of(range.low), range);
    if (first && measured == Measured::MASS) wanted *= total;
    range = narrow(row, range, wanted, &above);
    count = gather(row, value_of(range.low), value_of(range.high));
    if (count < 0) continue;
    measure_values(row, measured, row.scratch.candidates, count, row.scratch.measures);
    return count > 0 ? select(row.scratch.candidates, row.scratch.measures, count, above, wanted) : value_of(range.low);
  }
  return value_of(range.low);
}

static float top_k_threshold(const FilteredRow& row, int64_t top_k) {
  const int64_t blocks = num_blocks(row.row.vocab);
  float floor = -__builtin_inff();
  if (top_k <= blocks && blocks <= CAPACITY) {
    // The k-th largest of the block maxima has k entries at or above it.
    for (int64_t block = 0; block < blocks; ++block) row.scratch.candidates[block] = row.scratch.block_largest[block];
    measure_values(row, Measured::COUNT, row.scratch.candidates, blocks, row.scratch.measures);
    floor = select(row.scratch.candidates, row.scratch.measures, blocks, 0.0, static_cast<double>(top_k));
  }
  return find_threshold(row, Measured::COUNT, floor, floor, static_cast<double>(top_k));
}

static float top_p_threshold(const FilteredRow& row, double top_p, float floor) {
  // All entries of less weight than this together lack what may be left out; the margin covers rounding.
  const double least_weight = (1.0 - top_p) / static_cast<double>(row.row.vocab) * (1.0 - 1e-6);
  double bound = row.row_max + row.law.temperature * log(least_weight);
  if (row.row.is_probs) bound = row.row_max * pow(least_weight, row.law.temperature);
  const float float_bound = floor_to_float(bound);
  return find_threshold(row, Measured::MASS, floor, float_bound > floor ? float_bound : floor, top_p);
}

// Threshold of all filters, in their order, each on what the one before left.
static double filter_threshold(const FilteredRow& row, const Parameters& parameters) {
  float threshold = -__builtin_inff();
  if (parameters.top_k < row.row.vocab) threshold = top_k_threshold(row, parameters.top_k);
  if (parameters.top_p < 1.0) threshold = top_p_threshold(row, parameters.top_p, threshold);
  if (!(parameters.min_p > 0.0)) return threshold;
  const double share = row.row.is_probs ? row.row_max * pow(parameters.min_p, parameters.temperature)
                                        : row.row_max + parameters.temperature * log(parameters.min_p);
  return share > threshold ? share : threshold;
}
