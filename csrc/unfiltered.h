// Statistics of a row without filters.

static void sum_masses(const Row& row, RowStatistics* statistics) {
  statistics->weight_sum = 0.0;
  for (int64_t shard = 0; shard < num_shards(row.vocab); ++shard)
    statistics->weight_sum += statistics->shard_mass[shard];
}

// Turns masses relative to each shard's reference into masses relative to row_max, and sums them.
template <class Reference>
static void merge_masses(const Row& row, const Law& law, const Reference* references, RowStatistics* statistics) {
  const int64_t shards = num_shards(row.vocab);
  double* masses = statistics->shard_mass;
  if (law.weighing == Weighing::EXPONENTIAL) {
    const WideExponentialScale scale = wide_exponential_scale(law.temperature);
#pragma omp simd
    for (int64_t shard = 0; shard < shards; ++shard) {
      const double reference = masses[shard] > 0.0 ? references[shard] : statistics->row_max;
      masses[shard] *= wide_exponential(reference - statistics->row_max, scale);
    }
  } else {
    for (int64_t shard = 0; shard < shards; ++shard) {
      if (masses[shard] > 0.0) masses[shard] *= relative_weight(law, references[shard], statistics->row_max);
    }
  }
  sum_masses(row, statistics);
}

// Mass of a shard relative to its largest value.
static inline double whole_mass(const Row& row, const Law& law, const Entries& entries, float largest) {
  const bool weighs = largest > (row.is_probs ? 0.0f : -__builtin_inff());
  return weighs ? sum_weights<false>(law, entries, largest, 0.0f) : 0.0;
}

static ShardSum sum_shard(const Row& row, const Law& law, int64_t shard) {
  alignas(64) float buffer[SHARD];
  Entries entries;
  ShardSum sum;
  if (sum_in_one_reading(row, law, shard, buffer, &sum)) return sum;
  const float largest = load_largest(row, shard, buffer, &entries);
  return {largest, largest, whole_mass(row, law, entries, largest)};
}

// What proves a draft token accepted before its row is summed: the row's sum only grows.
struct AcceptProof {
  double uniform;
  double target_prob;
  double token_value;
};

// The sum so far, relative to the first reference, and the token's weight likewise.
struct RunningSum {
  double reference;
  double sum;
  double token_weight;
};

static bool proves(const Law& law, const AcceptProof& proof, const ShardSum& shard, RunningSum* running) {
  if (!(shard.mass > 0.0)) return false;
  if (running->sum == 0.0) {
    *running = {shard.reference, shard.mass, relative_weight(law, proof.token_value, shard.reference)};
  } else {
    running->sum += shard.mass * relative_weight(law, shard.reference, running->reference);
  }
  // The margin is wider than the error of float32 weights. What left float64 proves nothing.
  return running->sum < __builtin_inf() &&
         proof.uniform * running->token_weight < proof.target_prob * running->sum * (1.0 - 1e-5);
}

// Below this sum a row is a peak, whose largest weight has to be 1 and not nearly so: one-hot rows leave no residual.
constexpr double NEARLY_ONE = 1.001;

// Sums the shard of the largest value once more, relative to that value.
static void sharpen_peak(const Row& row, const Law& law, RowStatistics* statistics) {
  int64_t peak = 0;
  while (statistics->shard_largest[peak] != static_cast<float>(statistics->row_max)) ++peak;
  alignas(64) float buffer[SHARD];
  statistics->shard_mass[peak] = whole_mass(row, law, load_shard(row, peak, buffer), statistics->shard_largest[peak]);
  sum_masses(row, statistics);
}

// With a proof, which takes a single thread, weight_sum may be what was summed when acceptance was proven.
static void unfiltered_statistics(const Row& row, const Law& law, Executor executor, const AcceptProof* proof,
                                  double* references, RowStatistics* statistics) {
  bool proven = false;
  RunningSum running = {0.0, 0.0, 0.0};
  for_shards(executor, num_shards(row.vocab), [&](int64_t shard) {
    ShardSum sum = {0.0f, 0.0, 0.0};
    if (proven) {
      sum.largest = largest_of_shard(row, shard);
    } else {
      sum = sum_shard(row, law, shard);
    }
    statistics->shard_largest[shard] = sum.largest;
    statistics->shard_mass[shard] = sum.mass;
    references[shard] = sum.reference;
    if (proof && !proven) proven = proves(law, *proof, sum, &running);
  });
  statistics->threshold = -__builtin_inf();
  statistics->float_threshold = -__builtin_inff();
  statistics->valid = merge_largest(row, statistics);
  if (!statistics->valid) return;
  merge_masses(row, law, references, statistics);
  if (!proven && statistics->weight_sum < NEARLY_ONE) sharpen_peak(row, law, statistics);
  // The largest value alone weighs 1, also where a proof left its shard out.
  if (proven && statistics->weight_sum < 1.0) statistics->weight_sum = 1.0;
}
