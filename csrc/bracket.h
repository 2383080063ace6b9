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
// Which share of a bracket's mass a narrower one holds on each side: the sample has some hundred entries of the wider.
constexpr double NARROWED = 0.2;
// Vocabularies of a million ids are narrowed as often.
constexpr int MOST_BRACKETS = 4;
// A bound of the relative error of a float32 weight and of sums to a depth of seven.
constexpr double WEIGHT_ERROR = 8e-7;

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

// The largest value, to a thousandth of the range, below which the sample holds at most `mass`.
static float sampled_edge(const float* sample, const float* weights, float low, float high, double mass) {
  for (int step = 0; step < 10; ++step) {
    const float middle = low + 0.5f * (high - low);
    (sampled_below(sample, weights, middle) <= mass ? low : high) = middle;
  }
  return low;
}

// Gathers the sample and weighs it; returns how many entries.
static int64_t weigh_sample(const FilteredRow& row) {
  float* sample = row.scratch.candidates;
  float* weights = row.scratch.ordered;
  const int64_t count = gather_strips(row.row, sample);
  const ExponentialScale scale = row.law.scale;
  const float row_max = static_cast<float>(row.row_max);
#pragma omp simd
  for (int64_t index = 0; index < count; ++index) weights[index] = exponential(sample[index] - row_max, scale);
  return count;
}

// Brackets the value, `least` or above, below which `left_out` lies; false where the nucleus is narrow or its edge too
// thin to sample.
static bool find_bracket(const FilteredRow& row, float least, double left_out, Bracket* bracket) {
  const int64_t count = weigh_sample(row);
  const float* sample = row.scratch.candidates;
  const float* weights = row.scratch.ordered;
  const double share = left_out * static_cast<double>(count) / static_cast<double>(row.row.vocab);
  bracket->high = sampled_edge(sample, weights, least, static_cast<float>(row.row_max), (1.0 + BRACKET) * share);
  bracket->low = sampled_edge(sample, weights, least, bracket->high, (1.0 - BRACKET) * share);
  int32_t kept = 0;
#pragma omp simd reduction(+ : kept)
  for (int64_t index = 0; index < count; ++index) kept += sample[index] >= bracket->low;
  // A narrow nucleus is gathered whole, which is quicker.
  return kept * row.row.vocab > CAPACITY * count && bracket->low < bracket->high;
}

// Narrows a bracket that holds too many entries round the value below which a share of its mass lies.
static bool narrow_bracket(const FilteredRow& row, double share, Bracket* bracket) {
  weigh_sample(row);
  const float* sample = row.scratch.candidates;
  const float* weights = row.scratch.ordered;
  const Bracket wide = *bracket;
  const double below = sampled_below(sample, weights, wide.low);
  const double inside = sampled_below(sample, weights, wide.high) - below;
  if (share > NARROWED) {
    bracket->low = sampled_edge(sample, weights, wide.low, wide.high, below + (share - NARROWED) * inside);
  }
  if (share < 1.0 - NARROWED) {
    bracket->high = sampled_edge(sample, weights, bracket->low, wide.high, below + (share + NARROWED) * inside);
  }
  return bracket->low < bracket->high && (bracket->low > wide.low || bracket->high < wide.high);
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

// Sums what lies on either side of a bracket, the masses above by shard, and gathers what is inside; returns how many
// entries, or -1 if there are more than CAPACITY.
static int64_t split_row(const FilteredRow& row, float exponent, const Bracket& bracket, double* shard_mass,
                         SplitMass* whole) {
  const double scale = relative_weight(row.law, reference_of(exponent, row.law), row.row_max);
  int64_t count = 0;
  alignas(64) float buffer[SHARD];
  *whole = {0.0, 0.0};
  for (int64_t shard = 0; shard < num_shards(row.row.vocab); ++shard) {
    const Entries entries = load_shard(row.row, shard, buffer);
    const SplitMass split = split_mass(entries, exponent, row.law.scale, bracket);
    shard_mass[shard] = split.above * scale;
    whole->above += split.above * scale, whole->below += split.below * scale;
    for (int64_t begin = 0; begin < entries.count && count <= CAPACITY; begin += BLOCK) {
      const int64_t rest = entries.count - begin;
      count += append_candidates(entries.values + begin, rest < BLOCK ? rest : BLOCK, bracket.low, bracket.high,
                                 row.scratch.candidates + count);
    }
    row.scratch.ends[shard] = count;
  }
  return count <= CAPACITY ? count : -1;
}

// Finds the threshold and the masses it leaves; `total` is the row's mass relative to row_max. Returns false, with the
// masses spoilt, where another way has to be taken.
static bool bracket_nucleus(const FilteredRow& row, double top_p, double total, RowStatistics* statistics) {
  float exponent;
  Bracket bracket;
  if (!exponent_of(row.law, static_cast<float>(row.row_max), &exponent) || row.row.vocab <= 4 * CAPACITY) return false;
  const float least = nucleus_floor(row, top_p, total, -__builtin_inff());
  if (!find_bracket(row, least, (1.0 - top_p) * total, &bracket)) return false;
  SplitMass whole;
  int64_t count = split_row(row, exponent, bracket, statistics->shard_mass, &whole);
  for (int brackets = 1; count < 0 && brackets < MOST_BRACKETS; ++brackets) {
    const double share = ((1.0 - top_p) * total - whole.below) / (total - whole.above - whole.below);
    if (!(share > 0.0 && share < 1.0) || !narrow_bracket(row, share, &bracket)) return false;
    count = split_row(row, exponent, bracket, statistics->shard_mass, &whole);
  }
  if (count <= 0) return false;
  __builtin_memcpy(row.scratch.ordered, row.scratch.candidates, static_cast<size_t>(count) * sizeof(float));
  weigh_values(row, Measured::EXACT_MASS, row.scratch.candidates, count, row.scratch.measures);
  const double inside = fixed_sum(row.scratch.measures, count);
  // The least entries of the bracket are left out as long as their mass and that below it may be.
  const double left_out = (1.0 - top_p) * (whole.above + inside + whole.below);
  const double wanted = inside + whole.below - left_out;
  // The last term is what float64 sums in other orders may differ by.
  const double margin = WEIGHT_ERROR * (whole.below + (1.0 - top_p) * (whole.above + whole.below)) +
                        1e-12 * (whole.above + inside + whole.below);
  if (!(wanted > margin && wanted < inside - margin)) return false;
  const Selection found = select<false>(row.scratch.candidates, row.scratch.measures, count, 0.0, wanted);
  if (!(found.above < wanted - margin && found.reached > wanted + margin)) return false;
  statistics->threshold = found.value;
  add_kept(row, found.value, statistics->shard_mass);
  return true;
}
