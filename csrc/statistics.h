// Statistics of a row under all its parameters, and the memory they live in.

// Memory of one sequence: statistics of one target and one draft row, residual masses, and the filters' scratch.
struct Workspace {
  float* target_largest;
  float* draft_largest;
  double* target_mass;
  double* draft_mass;
  double* residual_mass;
  double* references;  // of the shards of the row measured last
  FilterScratch filter;
  void* memory;
};

// A build for AddressSanitizer puts bytes behind each array that nothing may touch.
#if !defined(SPECKER_FENCE)
#define SPECKER_FENCE(end) (end)
#define SPECKER_FENCE_BYTES 0
#endif

template <class Element>
static Element* take_array(char** at, size_t count) {
  Element* array = reinterpret_cast<Element*>(*at);
  *at = SPECKER_FENCE(*at + count * sizeof(Element));
  return array;
}

// One allocation of num_shards(vocab) * 40 bytes, and with filters vocab / 30 bytes and 83 kB more.
static Workspace make_workspace(int64_t vocab, bool filtered) {
  constexpr size_t ARRAYS = 12;
  const size_t shards = static_cast<size_t>(num_shards(vocab));
  const size_t blocks = filtered ? static_cast<size_t>(num_blocks(vocab)) : 0;
  const size_t room = filtered ? static_cast<size_t>(CAPACITY + BLOCK) : 0;
  const size_t measures = filtered ? CAPACITY : 0, bins = filtered ? BINS : 0;
  const size_t ends = filtered ? shards : 0;
  const size_t doubles = 4 * shards + measures + bins + ends, floats = 2 * shards + blocks + 2 * room;
  Workspace workspace;
  workspace.memory = ::operator new(doubles * sizeof(double) + floats * sizeof(float) + ARRAYS * SPECKER_FENCE_BYTES);
  char* at = static_cast<char*>(workspace.memory);
  workspace.target_mass = take_array<double>(&at, shards);
  workspace.draft_mass = take_array<double>(&at, shards);
  workspace.residual_mass = take_array<double>(&at, shards);
  workspace.references = take_array<double>(&at, shards);
  workspace.filter.measures = take_array<double>(&at, measures);
  workspace.filter.bins = take_array<double>(&at, bins);
  workspace.filter.ends = take_array<int64_t>(&at, ends);
  workspace.target_largest = take_array<float>(&at, shards);
  workspace.draft_largest = take_array<float>(&at, shards);
  workspace.filter.block_largest = take_array<float>(&at, blocks);
  workspace.filter.candidates = take_array<float>(&at, room);
  workspace.filter.ordered = take_array<float>(&at, room);
  return workspace;
}

static inline void free_workspace(const Workspace& workspace) { ::operator delete(workspace.memory); }

static void measure_blocks(const Entries& entries, float* block_largest) {
  constexpr int64_t WIDTH = 16;
  for (int64_t block = 0; block * BLOCK < entries.count; ++block) {
    const float* values = entries.values + block * BLOCK;
    float lanes[WIDTH];
#pragma omp simd
    for (int64_t lane = 0; lane < WIDTH; ++lane) {
      float largest = values[lane];
#pragma GCC unroll 8
      for (int64_t part = WIDTH; part < BLOCK; part += WIDTH) {
        const float value = values[part + lane];
        largest = value > largest ? value : largest;
      }
      lanes[lane] = largest;
    }
    block_largest[block] = largest_lane<WIDTH>(lanes);
  }
}

// Kept mass of a shard relative to its largest value; blocks without a kept entry are not read.
static double filtered_mass(const Row& row, const Law& law, int64_t shard, const float* block_largest, float largest,
                            float threshold) {
  if (!(largest >= threshold) || largest == (row.is_probs ? 0.0f : -__builtin_inff())) return 0.0;
  alignas(64) float kept[SHARD];
  const int64_t end = (shard + 1) * SHARD < row.vocab ? (shard + 1) * SHARD : row.vocab;
  int64_t count = 0;
  for (int64_t begin = shard * SHARD; begin < end; begin += BLOCK) {
    if (!(block_largest[begin / BLOCK] >= threshold)) continue;
    const int64_t size = end - begin < BLOCK ? end - begin : BLOCK;
    widen(row, begin, size, kept + count);
    count += size;
  }
  const int64_t padded = pad_entries(row.is_probs, count, kept);
  return kept_sum(law, {kept, count, padded}, largest, threshold);
}

// The largest values of the blocks of a shard of logits where they lie, and whether all are numbers.
static bool measure_logit_blocks(const Row& row, int64_t shard, float* block_largest) {
  const int64_t end = (shard + 1) * SHARD < row.vocab ? (shard + 1) * SHARD : row.vocab;
  bool valid = true;
  for (int64_t begin = shard * SHARD; begin < end; begin += BLOCK) {
    fetch_ahead(row.data + begin * width_of(row.dtype), BLOCK * width_of(row.dtype));
    const Measure measure = measure_logits(row, begin, end - begin < BLOCK ? end - begin : BLOCK);
    *block_largest++ = measure.largest;
    valid &= measure.valid;
  }
  return valid;
}

// First reading of a filtered shard: its largest value, those of its blocks and, where top-p needs it, the mass.
static ShardSum measure_shard(const Row& row, const Law& law, int64_t shard, bool sums, float* block_largest) {
  alignas(64) float buffer[SHARD];
  ShardSum sum = {0.0f, 0.0, 0.0};
  if (row.is_probs || row.adjusts()) {
    Entries entries;
    const float largest = load_largest(row, shard, buffer, &entries);
    measure_blocks(entries, block_largest);
    return {largest, largest, sums ? whole_mass(row, law, entries, largest) : 0.0};
  }
  const bool valid = measure_logit_blocks(row, shard, block_largest);
  float largest = -__builtin_inff();
  for (int64_t block = 0; block < ceil_div(shard_size(row, shard), BLOCK); ++block) {
    largest = larger(block_largest[block], largest);
  }
  if (!valid) return {__builtin_nanf(""), 0.0, 0.0};
  if (!sums) return {largest, largest, 0.0};
  if (!sum_in_one_reading(row, law, shard, buffer, &sum)) {
    sum = {largest, largest, whole_mass(row, law, load_shard(row, shard, buffer), largest)};
  }
  return sum;
}

static void measure_filtered(const Row& row, const Law& law, Executor executor, bool sums, const Workspace& workspace,
                             RowStatistics* statistics) {
  for_shards(executor, num_shards(row.vocab), [&](int64_t shard) {
    const ShardSum sum = measure_shard(row, law, shard, sums, workspace.filter.block_largest + shard * (SHARD / BLOCK));
    statistics->shard_largest[shard] = sum.largest;
    statistics->shard_mass[shard] = sum.mass;
    workspace.references[shard] = sum.reference;
  });
  statistics->valid = merge_largest(row, statistics);
  if (sums && statistics->valid) merge_masses(row, law, workspace.references, statistics);
}

static void filtered_statistics(const Row& row, const Law& law, const Parameters& parameters, Executor executor,
                                const Workspace& workspace, RowStatistics* statistics) {
  // top-p of the whole row needs its mass, of which top-k alone leaves little.
  const bool sums = parameters.top_p < 1.0 && parameters.top_k == row.vocab;
  measure_filtered(row, law, executor, sums, workspace, statistics);
  if (!statistics->valid) return;
  const FilteredRow filtered = {row, law, statistics->row_max, workspace.filter};
  const double total = sums ? statistics->weight_sum : __builtin_nan("");
  bool has_masses = sums && bracket_nucleus(filtered, parameters.top_p, total, statistics);
  const double least = min_p_threshold(filtered, parameters);
  if (!has_masses) {
    statistics->threshold = filter_threshold(filtered, parameters, total);
  } else if (least > statistics->threshold) {
    statistics->threshold = least;
    has_masses = false;
  }
  statistics->float_threshold = ceil_to_float(statistics->threshold);
  if (has_masses) {
    statistics->weight_sum = fixed_sum(statistics->shard_mass, num_shards(row.vocab));
    return;
  }
  for_shards(executor, num_shards(row.vocab), [&](int64_t shard) {
    statistics->shard_mass[shard] = filtered_mass(row, law, shard, workspace.filter.block_largest,
                                                  statistics->shard_largest[shard], statistics->float_threshold);
  });
  merge_masses(row, law, statistics->shard_largest, statistics);
}

static void row_statistics(const Row& row, const Law& law, const Parameters& parameters, Executor executor,
                           const Workspace& workspace, const AcceptProof* proof, RowStatistics* statistics) {
  if (parameters.greedy) {
    greedy_statistics(row, executor, statistics);
  } else if (parameters.filtered) {
    filtered_statistics(row, law, parameters, executor, workspace, statistics);
  } else {
    unfiltered_statistics(row, law, executor, proof, workspace.references, statistics);
  }
}

static inline double value_at(const Row& row, int64_t token) {
  float value;
  widen(row, token, 1, &value);
  return value;
}

// Probability of a token under the row's distribution.
static double token_prob(const Row& row, const Law& law, const Parameters& parameters, const RowStatistics& statistics,
                         int64_t token) {
  if (parameters.greedy) return token == statistics.argmax ? 1.0 : 0.0;
  const double value = value_at(row, token);
  if (!(value >= statistics.threshold)) return 0.0;
  return relative_weight(law, value, statistics.row_max) / statistics.weight_sum;
}

static double token_log_prob(const Row& row, const Law& law, const Parameters& parameters,
                             const RowStatistics& statistics, int64_t token) {
  if (parameters.greedy) return 0.0;
  return log_relative_weight(law, value_at(row, token), statistics.row_max) - log(statistics.weight_sum);
}
