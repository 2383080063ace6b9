// The thresholds of top-k, top-p and min-p, found without sorting the row.
//
// A threshold is the largest value such that the entries >= it reach a wanted measure: a count for top-k, a share of
// the mass for top-p. Block maxima, a sample of the row and the mass that may be left out give a floor that no
// threshold is below; what lies above it is gathered, in one reading of the blocks that reach it, and selected from.
// Where too much lies above it, a histogram over the order of float32 narrows the range first: 2048 bins of 2^32 orders
// leave at most 2^21 after one reading and a single one after three. Masses are float32 weights first; where they leave
// a decision of top-p open it is made again with float64 weights.

constexpr int64_t CAPACITY = 4096;
constexpr int64_t BINS = 2048;
constexpr int64_t GROUP = 32;
// Strands of a row whose maxima bound its top-k.
constexpr int64_t STRANDS = 512;
// Blocks in a sample of the row.
constexpr int64_t SAMPLE_BLOCKS = 16;
// A bound of the relative error of float32 weights and their sums.
constexpr double MASS_ERROR = 2e-6;

// Memory of one filtered row; each sequence uses it for one row at a time.
struct FilterScratch {
  float* block_largest;  // num_blocks(vocab)
  float* candidates;     // CAPACITY + BLOCK: a block too many is gathered before the overflow is seen
  double* measures;      // CAPACITY
  double* bins;          // BINS
  float* ordered;        // CAPACITY + BLOCK
  int64_t* ends;         // num_shards(vocab)
};

struct FilteredRow {
  const Row& row;
  const Law& law;
  double row_max;
  const FilterScratch& scratch;
};

enum class Measured { COUNT, MASS, EXACT_MASS };

static void weigh_values(const FilteredRow& row, Measured measured, const float* values, int64_t count, double* out) {
  const double row_max = row.row_max;
  if (measured == Measured::COUNT) {
    for (int64_t index = 0; index < count; ++index) out[index] = 1.0;
  } else if (row.law.weighing != Weighing::EXPONENTIAL) {
    for (int64_t index = 0; index < count; ++index) out[index] = relative_weight(row.law, values[index], row_max);
  } else if (measured == Measured::MASS) {
    const ExponentialScale scale = row.law.scale;
    const float reference = static_cast<float>(row_max);
#pragma omp simd
    for (int64_t index = 0; index < count; ++index) out[index] = exponential(values[index] - reference, scale);
  } else {
    const WideExponentialScale scale = wide_exponential_scale(row.law.temperature);
#pragma omp simd
    for (int64_t index = 0; index < count; ++index) {
      out[index] = wide_exponential(static_cast<double>(values[index]) - row_max, scale);
    }
  }
}

static int64_t block_values(const Row& row, int64_t block, float* buffer, const float** values) {
  const int64_t begin = block * BLOCK;
  const int64_t count = row.vocab - begin < BLOCK ? row.vocab - begin : BLOCK;
  *values = reinterpret_cast<const float*>(row.data) + begin;
  if (row.read_in_place()) return count;
  widen(row, begin, count, buffer);
  *values = buffer;
  return count;
}

// Calls body(values, count) for the blocks that hold a value >= floor; body returns false to stop.
template <class Body>
static void for_blocks(const FilteredRow& row, float floor, Body body) {
  alignas(64) float buffer[BLOCK];
  for (int64_t block = 0; block < num_blocks(row.row.vocab); ++block) {
    if (!(row.scratch.block_largest[block] >= floor)) continue;
    const float* values;
    const int64_t count = block_values(row.row, block, buffer, &values);
    if (!body(values, count)) return;
  }
}

// Bit `index` tells whether values[index] is in [floor, ceiling].
static inline uint32_t hits_of_group(const float* values, float floor, float ceiling) {
  uint32_t hits = 0;
#pragma omp simd reduction(| : hits)
  for (int64_t index = 0; index < GROUP; ++index) {
    hits |= (values[index] >= floor && values[index] <= ceiling) ? uint32_t{1} << index : 0;
  }
  return hits;
}

// Appends the values in [floor, ceiling]; may write a vector of values more.
static int64_t append_candidates(const float* values, int64_t count, float floor, float ceiling, float* out) {
  int64_t appended = 0, group = 0;
#if defined(SPECKER_COMPRESS)
  for (; group + COMPRESSED <= count; group += COMPRESSED) {
    appended += SPECKER_COMPRESS(values + group, floor, ceiling, out + appended);
  }
#endif
  for (; group + GROUP <= count; group += GROUP) {
    for (uint32_t hits = hits_of_group(values + group, floor, ceiling); hits; hits &= hits - 1) {
      out[appended++] = values[group + __builtin_ctz(hits)];
    }
  }
  for (; group < count; ++group) {
    if (values[group] >= floor && values[group] <= ceiling) out[appended++] = values[group];
  }
  return appended;
}

// Gathers the values in [floor, ceiling]; returns -1 if there are more than CAPACITY.
static int64_t gather(const FilteredRow& row, float floor, float ceiling) {
  int64_t gathered = 0;
  for_blocks(row, floor, [&](const float* values, int64_t count) {
    gathered += append_candidates(values, count, floor, ceiling, row.scratch.candidates + gathered);
    return gathered <= CAPACITY;
  });
  return gathered <= CAPACITY ? gathered : -1;
}

static double measure_above(const FilteredRow& row, Measured measured, float floor) {
  double total = 0.0;
  for_blocks(row, floor, [&](const float* values, int64_t count) {
    double measures[BLOCK];
    weigh_values(row, measured, values, count, measures);
    for (int64_t index = 0; index < count; ++index) measures[index] = values[index] >= floor ? measures[index] : 0.0;
    total += fixed_sum(measures, count);
    return true;
  });
  return total;
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

static void fill_bins(const FilteredRow& row, Measured measured, OrderRange range) {
  double* bins = row.scratch.bins;
  const float floor = value_of(range.low), ceiling = value_of(range.high);
  const int shift = range.shift();
  for (int64_t bin = 0; bin < BINS; ++bin) bins[bin] = 0.0;
  for_blocks(row, floor, [&](const float* values, int64_t count) {
    float candidates[BLOCK];
    double measures[BLOCK];
    const int64_t hits = append_candidates(values, count, floor, ceiling, candidates);
    weigh_values(row, measured, candidates, hits, measures);
    for (int64_t index = 0; index < hits; ++index) {
      bins[(order_of(candidates[index]) - range.low) >> shift] += measures[index];
    }
    return true;
  });
}

// Moves `range` to the bin in which the measure reaches `wanted`, what lies above that bin to `above`, and returns what
// lies inside it.
static double narrow(const FilteredRow& row, double wanted, OrderRange* narrowed, double* above) {
  const OrderRange range = *narrowed;
  const int shift = range.shift();
  int64_t bin = static_cast<int64_t>((range.high - range.low) >> shift), lowest = 0;
  // Where rounding leaves all of it short of `wanted`, the last bin that holds anything is the one.
  while (lowest < bin && !(row.scratch.bins[lowest] > 0.0)) ++lowest;
  while (bin > lowest && !(*above + row.scratch.bins[bin] >= wanted)) *above += row.scratch.bins[bin--];
  const uint64_t low = range.low + (static_cast<uint64_t>(bin) << shift);
  const uint64_t high = low + (uint64_t{1} << shift) - 1;
  *narrowed = {static_cast<uint32_t>(low), high < range.high ? static_cast<uint32_t>(high) : range.high};
  return row.scratch.bins[bin];
}

static Selection select_gathered(const FilteredRow& row, Measured measured, int64_t count, double above,
                                 double wanted) {
  if (measured == Measured::COUNT) return select<true>(row.scratch.candidates, nullptr, count, above, wanted);
  weigh_values(row, measured, row.scratch.candidates, count, row.scratch.measures);
  return select<false>(row.scratch.candidates, row.scratch.measures, count, above, wanted);
}

// The threshold among the values >= floor; its `reached` falls short of `wanted` if it lies below the floor.
static Selection find_threshold(const FilteredRow& row, Measured measured, float floor, double wanted) {
  OrderRange range = {order_of(floor), order_of(static_cast<float>(row.row_max))};
  double above = 0.0;
  int64_t count = gather(row, floor, static_cast<float>(row.row_max));
  while (count < 0) {
    fill_bins(row, measured, range);
    const double inside = narrow(row, wanted, &range, &above);
    // A single value, however many entries are tied at it.
    if (range.low == range.high) return {value_of(range.low), above, above + inside};
    count = gather(row, value_of(range.low), value_of(range.high));
  }
  return select_gathered(row, measured, count, above, wanted);
}

// Gathers some evenly spaced blocks; `step` blocks of the row stand behind each.
static int64_t gather_sample(const FilteredRow& row, int64_t* step) {
  const int64_t blocks = num_blocks(row.row.vocab);
  *step = ceil_div(blocks, SAMPLE_BLOCKS);
  int64_t gathered = 0;
  for (int64_t block = 0; block < blocks; block += *step) {
    const float* values;
    float* out = row.scratch.candidates + gathered;
    const int64_t count = block_values(row.row, block, out, &values);
    if (values != out) __builtin_memcpy(out, values, static_cast<size_t>(count) * sizeof(float));
    gathered += count;
  }
  return gathered;
}

// A value that the threshold is likely not below: half as much again of the sample lies above it as it takes.
static float sampled_count_floor(const FilteredRow& row, int64_t top_k) {
  int64_t step;
  const int64_t count = gather_sample(row, &step);
  const double wanted = 1.5 * static_cast<double>(top_k) / static_cast<double>(step) + 8.0;
  if (wanted >= static_cast<double>(count)) return -__builtin_inff();
  return select_gathered(row, Measured::COUNT, count, 0.0, wanted).value;
}

// Likewise: what the sample has below it amounts to half of the mass that may be left out.
static float sampled_mass_floor(const FilteredRow& row, float floor, double left_out) {
  int64_t step;
  const int64_t count = gather_sample(row, &step);
  weigh_values(row, Measured::MASS, row.scratch.candidates, count, row.scratch.measures);
  for (int64_t index = 0; index < count; ++index) {
    if (!(row.scratch.candidates[index] >= floor)) row.scratch.measures[index] = 0.0;
  }
  const double wanted = fixed_sum(row.scratch.measures, count) - 0.5 * left_out / static_cast<double>(step);
  if (!(wanted > 0.0)) return floor;
  const float sampled = select<false>(row.scratch.candidates, row.scratch.measures, count, 0.0, wanted).value;
  return sampled > floor ? sampled : floor;
}

// The k-th largest of the maxima of interleaved strands has k entries at or above it, and few more.
static float strand_floor(const FilteredRow& row, int64_t top_k) {
  alignas(64) float buffer[BLOCK];
  float* maxima = row.scratch.candidates;
  for (int64_t strand = 0; strand < STRANDS; ++strand) maxima[strand] = -__builtin_inff();
  for (int64_t block = 0; block < num_blocks(row.row.vocab); ++block) {
    const float* values;
    const int64_t count = block_values(row.row, block, buffer, &values);
    float* strands = maxima + block * BLOCK % STRANDS;
#pragma omp simd
    for (int64_t index = 0; index < count; ++index) {
      strands[index] = values[index] > strands[index] ? values[index] : strands[index];
    }
  }
  return select_gathered(row, Measured::COUNT, STRANDS, 0.0, static_cast<double>(top_k)).value;
}

static float top_k_threshold(const FilteredRow& row, int64_t top_k) {
  const int64_t blocks = num_blocks(row.row.vocab);
  const double wanted = static_cast<double>(top_k);
  float floor = -__builtin_inff();
  if (top_k <= blocks && blocks <= CAPACITY) {
    // The k-th largest of the block maxima has k entries at or above it.
    for (int64_t block = 0; block < blocks; ++block) row.scratch.candidates[block] = row.scratch.block_largest[block];
    floor = select_gathered(row, Measured::COUNT, blocks, 0.0, wanted).value;
  } else if (2 * top_k <= STRANDS) {
    floor = strand_floor(row, top_k);
  } else if (row.row.vocab > CAPACITY) {
    floor = sampled_count_floor(row, top_k);
  }
  const Selection found = find_threshold(row, Measured::COUNT, floor, wanted);
  if (found.reached >= wanted) return found.value;
  return find_threshold(row, Measured::COUNT, -__builtin_inff(), wanted).value;
}
