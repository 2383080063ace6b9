// Statistics of a row: one pass gives, per shard, the largest value, validity and the sum of weights.

struct Parameters {
  double temperature;
  int64_t top_k;  // vocab where off
  double top_p;   // 1 where off
  double min_p;   // 0 where off
  bool greedy;
  bool filtered;
};

struct RowStatistics {
  bool valid;
  double row_max;
  double threshold;       // an id is kept iff its value >= threshold
  float float_threshold;  // the least float32 that is not below it
  double weight_sum;      // kept weights relative to row_max
  int64_t argmax;         // of greedy rows
  float* shard_largest;   // null where the statistics come from a receipt
  double* shard_mass;     // kept weights of a shard relative to row_max
};

static inline int64_t read_integer(const Integers& integers, int64_t index) {
  return integer_at(integers, index * integers.stride);
}

static inline double read_real(const Reals& reals, int64_t index, double off) {
  return reals.data ? real_at(reals, index * reals.stride) : off;
}

static Parameters read_parameters(const SamplingParameters& sampling, int64_t sequence, int64_t vocab,
                                  int32_t* status) {
  Parameters parameters;
  parameters.temperature = read_real(sampling.temperature, sequence, 1.0);
  parameters.top_p = read_real(sampling.top_p, sequence, 1.0);
  parameters.min_p = read_real(sampling.min_p, sequence, 0.0);
  const int64_t top_k = sampling.top_k.data ? read_integer(sampling.top_k, sequence) : 0;
  parameters.top_k = top_k > 0 && top_k < vocab ? top_k : vocab;
  // Written so that NaN falls in.
  if (!(parameters.temperature >= 0.0 && parameters.temperature < __builtin_inf())) *status |= INVALID_TEMPERATURE;
  if (!(parameters.top_p >= 0.0)) *status |= INVALID_TOP_P;
  if (!(parameters.min_p >= 0.0 && parameters.min_p <= 1.0)) *status |= INVALID_MIN_P;
  parameters.greedy = parameters.temperature < GREEDY_TEMPERATURE || parameters.top_p <= 0.0;
  if (parameters.greedy) parameters.temperature = 1.0;
  parameters.filtered =
      !parameters.greedy && (parameters.top_k < vocab || parameters.top_p < 1.0 || parameters.min_p > 0.0);
  return parameters;
}

// Calls body(shard) for every shard, on the executor's threads.
template <class Body>
static void for_shards(Executor executor, int64_t count, Body body) {
  if (!executor.run || count < 2) {
    for (int64_t shard = 0; shard < count; ++shard) body(shard);
    return;
  }
  executor.run(
      count,
      [](void* context, int64_t begin, int64_t end) {
        for (int64_t shard = begin; shard < end; ++shard) (*static_cast<Body*>(context))(shard);
      },
      &body);
}

static inline int64_t shard_size(const Row& row, int64_t shard) {
  const int64_t rest = row.vocab - shard * SHARD;
  return rest < SHARD ? rest : SHARD;
}

static inline Entries load_shard(const Row& row, int64_t shard, float* buffer) {
  return load_entries(row, shard * SHARD, (shard + 1) * SHARD, buffer);
}

// Loads a shard and returns its largest value; NaN marks a shard that makes the row invalid.
static inline float load_largest(const Row& row, int64_t shard, float* buffer, Entries* entries) {
  const Measure measure = load_and_measure(row, shard * SHARD, (shard + 1) * SHARD, buffer, entries);
  return measure.valid && measure.largest < __builtin_inff() ? measure.largest : __builtin_nanf("");
}

// The largest value of a shard that is not needed besides.
static inline float largest_of_shard(const Row& row, int64_t shard) {
  if (row.is_probs || row.adjusts()) {
    alignas(64) float buffer[SHARD];
    Entries entries;
    return load_largest(row, shard, buffer, &entries);
  }
  const Measure measure = measure_logits(row, shard * SHARD, shard_size(row, shard));
  return measure.valid ? measure.largest : __builtin_nanf("");
}

static bool merge_largest(const Row& row, RowStatistics* statistics) {
  float largest = -__builtin_inff();
  for (int64_t shard = 0; shard < num_shards(row.vocab); ++shard) {
    const float candidate = statistics->shard_largest[shard];
    if (candidate != candidate) return false;
    if (candidate > largest) largest = candidate;
  }
  statistics->row_max = largest;
  return row.is_probs ? largest > 0.0f : largest > -__builtin_inff();
}

// Lowest id of the largest value.
static int64_t find_argmax(const Row& row, const RowStatistics& statistics) {
  alignas(64) float buffer[SHARD];
  const float largest = static_cast<float>(statistics.row_max);
  int64_t shard = 0;
  while (statistics.shard_largest[shard] != largest) ++shard;
  const Entries entries = load_shard(row, shard, buffer);
  int64_t index = 0;
  while (entries.values[index] != largest) ++index;
  return shard * SHARD + index;
}

static void greedy_statistics(const Row& row, Executor executor, RowStatistics* statistics) {
  for_shards(executor, num_shards(row.vocab),
             [&](int64_t shard) { statistics->shard_largest[shard] = largest_of_shard(row, shard); });
  statistics->valid = merge_largest(row, statistics);
  if (!statistics->valid) return;
  statistics->argmax = find_argmax(row, *statistics);
  statistics->threshold = statistics->row_max;
  statistics->weight_sum = 1.0;
}
