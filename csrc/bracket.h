// The threshold of top-p on rows whose nucleus is too wide to gather.
//
// What top-p leaves out is small, so float32 weights tell its mass to a small share of the whole: a sample of the row
// brackets the threshold, one more reading sums what is above and what is below the bracket and gathers what is
// inside, and a selection decides. The masses above are kept for emission. Where the bracket misses or float32 leaves
// the decision open, the general search takes over.

// Entries that lie together in the sample.
constexpr int64_t STRIP = 16;
// By how much the left-out mass of the bracket's ends is off what is wanted.
constexpr double BRACKET = 0.1;
// A bound of the relative error of a float32 weight and of sums of eight.
constexpr double WEIGHT_ERROR = 8e-7;

struct Bracket {
  float low;
  float high;
  float magic;
  float lowest;
};

struct SplitMass {
  double above;
  double below;
};

// Gathers strips of entries, evenly spaced; returns how many entries.
static int64_t gather_strips(const Row& row, float* out) {
  const int64_t strips = CAPACITY / STRIP, step = row.vocab / strips;
  for (int64_t strip = 0; strip < strips; ++strip) widen(row, strip * step, STRIP, out + strip * STRIP);
  return strips * STRIP;
}

// Mass of the sample below a value.
static double sampled_below(const float* sample, const float* weights, float value) {
  double lanes[LANES] = {};
  for (int64_t begin = 0; begin < CAPACITY; begin += CHUNK) {
#pragma omp simd
    for (int64_t lane = 0; lane < LANES; ++lane) {
      float sum = 0.0f;
#pragma GCC unroll 8
      for (int64_t part = begin; part < begin + CHUNK; part += LANES) {
        sum += sample[part + lane] < value ? weights[part + lane] : 0.0f;
      }
      lanes[lane] += static_cast<double>(sum);
    }
  }
  return sum_of_lanes<LANES>(lanes);
}

// The largest value, to a few bits, below which the sample holds at most `mass`.
static float sampled_edge(const float* sample, const float* weights, float row_max, double mass) {
  uint32_t low = order_of(-__builtin_inff()), high = order_of(row_max);
  while (high - low > 256) {
    const uint32_t middle = low + (high - low) / 2;
    (sampled_below(sample, weights, value_of(middle)) <= mass ? low : high) = middle;
  }
  return value_of(low);
}

// Brackets the value below which `left_out` lies; false where the nucleus is narrow or its edge too thin to sample.
static bool find_bracket(const FilteredRow& row, double left_out, Bracket* bracket) {
  float* sample = row.scratch.candidates;
  float* weights = row.scratch.ordered;
  const int64_t count = gather_strips(row.row, sample);
  const ExponentialScale scale = row.law.scale;
  const float row_max = static_cast<float>(row.row_max);
#pragma omp simd
  for (int64_t index = 0; index < count; ++index) weights[index] = exponential(sample[index] - row_max, scale);
  const double share = left_out * static_cast<double>(count) / static_cast<double>(row.row.vocab);
  bracket->high = sampled_edge(sample, weights, row_max, (1.0 + BRACKET) * share);
  bracket->low = sampled_edge(sample, weights, row_max, (1.0 - BRACKET) * share);
  int32_t kept = 0;
#pragma omp simd reduction(+ : kept)
  for (int64_t index = 0; index < count; ++index) kept += sample[index] >= bracket->low;
  // A narrow nucleus is gathered whole, which is quicker.
  return kept * row.row.vocab > CAPACITY * count && bracket->low < bracket->high;
}

static SplitMass split_shard(const Entries& entries, const ExponentialScale scale, const Bracket bracket) {
  double above[LANES] = {}, below[LANES] = {};
  for (int64_t begin = 0; begin < entries.padded; begin += CHUNK) {
    const float* values = entries.values + begin;
#pragma omp simd
    for (int64_t lane = 0; lane < LANES; ++lane) {
      float high = 0.0f, low = 0.0f;
#pragma GCC unroll 8
      for (int64_t part = 0; part < CHUNK; part += LANES) {
        const float value = larger(bracket.lowest, values[part + lane]);
        const float weight = shifted_power(value, scale, bracket.magic);
        high += value > bracket.high ? weight : 0.0f;
        low += value < bracket.low ? weight : 0.0f;
      }
      above[lane] += static_cast<double>(high), below[lane] += static_cast<double>(low);
    }
  }
  return {sum_of_lanes<LANES>(above) * EXPONENT_SHIFT, sum_of_lanes<LANES>(below) * EXPONENT_SHIFT};
}

// Adds the weights of the gathered values that are kept to their shards' masses.
static void add_kept(const FilteredRow& row, float threshold, double* shard_mass) {
  const float* values = row.scratch.ordered;
  const int64_t shards = num_shards(row.row.vocab);
  weigh_values(row, Measured::MASS, values, row.scratch.ends[shards - 1], row.scratch.measures);
  int64_t index = 0;
  for (int64_t shard = 0; shard < shards; ++shard) {
    for (; index < row.scratch.ends[shard]; ++index) {
      shard_mass[shard] += values[index] >= threshold ? row.scratch.measures[index] : 0.0;
    }
  }
}

// Finds the threshold and the masses it leaves; `total` is the row's mass relative to row_max. Returns false, with the
// masses spoilt, where another way has to be taken.
static bool bracket_nucleus(const FilteredRow& row, double top_p, double total, RowStatistics* statistics) {
  float exponent;
  Bracket bracket;
  if (!exponent_of(row.law, static_cast<float>(row.row_max), &exponent) || row.row.vocab <= 4 * CAPACITY) return false;
  if (!find_bracket(row, (1.0 - top_p) * total, &bracket)) return false;
  bracket.magic = MAGIC - exponent;
  bracket.lowest = (exponent - LOWEST_EXPONENT) / row.law.scale.high;
  const double scale = relative_weight(row.law, reference_of(exponent, row.law), row.row_max);
  const int64_t shards = num_shards(row.row.vocab);
  double above = 0.0, below = 0.0;
  int64_t count = 0;
  alignas(64) float buffer[SHARD];
  for (int64_t shard = 0; shard < shards; ++shard) {
    const Entries entries = load_shard(row.row, shard, buffer);
    const SplitMass split = split_shard(entries, row.law.scale, bracket);
    statistics->shard_mass[shard] = split.above * scale;
    above += split.above * scale, below += split.below * scale;
    for (int64_t begin = 0; begin < entries.count; begin += BLOCK) {
      const int64_t rest = entries.count - begin;
      count += append_candidates(entries.values + begin, rest < BLOCK ? rest : BLOCK, bracket.low, bracket.high,
                                 row.scratch.candidates + count);
      if (count > CAPACITY) return false;
    }
    row.scratch.ends[shard] = count;
  }
  __builtin_memcpy(row.scratch.ordered, row.scratch.candidates, static_cast<size_t>(count) * sizeof(float));
  weigh_values(row, Measured::EXACT_MASS, row.scratch.candidates, count, row.scratch.measures);
  const double inside = fixed_sum(row.scratch.measures, count);
  // The least entries of the bracket are left out as long as their mass and that below it may be.
  const double left_out = (1.0 - top_p) * (above + inside + below);
  const double wanted = inside + below - left_out;
  // The second term is what float64 sums in other orders may differ by.
  const double margin = WEIGHT_ERROR * 2.0 * (left_out + below + inside) + 1e-12 * (above + inside + below);
  if (!(count > 0 && wanted > margin && wanted < inside - margin)) return false;
  const Selection found = select<false>(row.scratch.candidates, row.scratch.measures, count, 0.0, wanted);
  if (!(found.above < wanted - margin && found.reached > wanted + margin)) return false;
  statistics->threshold = found.value;
  add_kept(row, found.value, statistics->shard_mass);
  return true;
}
