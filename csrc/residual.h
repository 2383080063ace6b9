// The residual max(target - draft, 0), a shard at a time, and draws from it.

// The two scales of a shard's weights, as a ratio in two floats: exactly 1 for equal rows, whose residual is then 0.
struct ScaleRatio {
  float high;
  float low;
};

static inline ScaleRatio scale_ratio(double ratio) {
  // Capped: 0 * inf would be NaN.
  if (!(ratio < 1e38)) return {1e38f, 0.0f};
  const float high = static_cast<float>(ratio);
  return {high, static_cast<float>(ratio - high)};
}

SPECKER_INLINE float residual_of(float target, float draft, const ScaleRatio& ratio) {
  const float residual = fused(-draft, ratio.low, fused(-draft, ratio.high, target));
  return residual > 0.0f ? residual : 0.0f;
}

// Overwrites the target's weights with the residual and returns its sum.
static double subtract_weights(const float* draft_weights, int64_t padded, const ScaleRatio& ratio, float* weights) {
#pragma omp simd
  for (int64_t index = 0; index < padded; ++index) {
    weights[index] = residual_of(weights[index], draft_weights[index], ratio);
  }
  return fixed_sum(weights, padded);
}

// The same straight from two rows of logits, by shifted exponentials.
template <bool FILTERED>
static double subtract_logits(const Sampled& target, const Sampled& draft, const Entries& target_entries,
                              const Entries& draft_entries, float target_largest, float draft_largest,
                              const ScaleRatio& ratio, float* residual) {
  const float target_threshold = target.statistics.float_threshold, draft_threshold = draft.statistics.float_threshold;
  const ExponentialScale target_scale = target.law.scale, draft_scale = draft.law.scale;
  double lanes[LANES] = {};
  for (int64_t begin = 0; begin < target_entries.padded; begin += CHUNK) {
#pragma omp simd
    for (int64_t lane = 0; lane < LANES; ++lane) {
      float sum = 0.0f;
#pragma GCC unroll 8
      for (int64_t part = 0; part < CHUNK; part += LANES) {
        const float target_value = target_entries.values[begin + part + lane];
        const float draft_value = draft_entries.values[begin + part + lane];
        float target_weight = shifted_exponential(target_value - target_largest, target_scale);
        float draft_weight = shifted_exponential(draft_value - draft_largest, draft_scale);
        if (FILTERED) {
          target_weight = target_value >= target_threshold ? target_weight : 0.0f;
          draft_weight = draft_value >= draft_threshold ? draft_weight : 0.0f;
        }
        const float rest = residual_of(target_weight, draft_weight, ratio);
        residual[begin + part + lane] = rest;
        sum += rest;
      }
      lanes[lane] += static_cast<double>(sum);
    }
  }
  return fixed_sum(lanes, LANES);
}

struct ShardResidual {
  double sum;
  double scale;  // of the residual's entries and sum to probabilities
};

// Writes max(target - draft, 0) of a shard, in units of the target's scale.
static ShardResidual shard_residual(const Sampled& target, const Sampled& draft, int64_t shard, float* residual) {
  if (!(target.statistics.shard_mass[shard] > 0.0)) return {0.0, 0.0};
  const float target_largest = target.statistics.shard_largest[shard];
  const double scale = shard_scale(target, target_largest);
  if (!(scale > 0.0)) return {0.0, 0.0};
  alignas(64) float target_buffer[SHARD], draft_buffer[SHARD], draft_weights[SHARD];
  const Entries target_entries = load_shard(target.row, shard, target_buffer);
  const Entries draft_entries = load_shard(draft.row, shard, draft_buffer);
  const float draft_largest = draft.statistics.shard_largest ? draft.statistics.shard_largest[shard]
                                                             : measure_entries(draft.row, draft_entries).largest;
  const float target_threshold = target.statistics.float_threshold, draft_threshold = draft.statistics.float_threshold;
  if (!(draft_largest > (draft.row.is_probs ? 0.0f : -__builtin_inff()) && draft_largest >= draft_threshold)) {
    kept_weights(target.law, target_entries, target_largest, target_threshold, residual);
    return {fixed_sum(residual, target_entries.padded), scale};
  }
  const ScaleRatio ratio = scale_ratio(shard_scale(draft, draft_largest) / scale);
  if (target.law.weighing == Weighing::EXPONENTIAL && draft.law.weighing == Weighing::EXPONENTIAL) {
    const bool filtered = target_threshold > -__builtin_inff() || draft_threshold > -__builtin_inff();
    const auto subtract = filtered ? subtract_logits<true> : subtract_logits<false>;
    const double sum =
        subtract(target, draft, target_entries, draft_entries, target_largest, draft_largest, ratio, residual);
    return {sum, scale * EXPONENT_SHIFT};
  }
  kept_weights(target.law, target_entries, target_largest, target_threshold, residual);
  kept_weights(draft.law, draft_entries, draft_largest, draft_threshold, draft_weights);
  return {subtract_weights(draft_weights, target_entries.padded, ratio, residual), scale};
}

// The columns of a reduced draft vocabulary in the order of their target ids; null where columns are target ids.
struct DraftColumns {
  const int64_t* columns;
  const int64_t* target_ids;
  int64_t count;
};

static int64_t target_id_of(const DraftColumns& columns, int64_t column) {
  if (!columns.columns) return column;
  int64_t entry = 0;
  while (columns.columns[entry] != column) ++entry;
  return columns.target_ids[entry];
}

// Probability of a column under the draft's statistics, which may come from a receipt.
static double column_prob(const Sampled& draft, int64_t column) {
  return token_prob(draft.row, draft.law, draft.parameters, draft.statistics, column);
}

// Writes max(target - draft, 0) of a shard, the mass of columns that share a target id added first.
static ShardResidual mapped_residual(const Sampled& target, const Sampled& draft, const DraftColumns& columns,
                                     int64_t shard, float* residual) {
  if (!(target.statistics.shard_mass[shard] > 0.0)) return {0.0, 0.0};
  const float largest = target.statistics.shard_largest[shard];
  const double scale = shard_scale(target, largest);
  if (!(scale > 0.0)) return {0.0, 0.0};
  shard_weights(target, shard, largest, residual);
  const int64_t begin = shard * SHARD, size = shard_size(target.row, shard);
  int64_t entry = lower_bound(columns.target_ids, columns.count, begin);
  while (entry < columns.count && columns.target_ids[entry] < begin + size) {
    const int64_t token = columns.target_ids[entry];
    double prob = 0.0;
    for (; entry < columns.count && columns.target_ids[entry] == token; ++entry) {
      prob += column_prob(draft, columns.columns[entry]);
    }
    const double rest = static_cast<double>(residual[token - begin]) - prob / scale;
    residual[token - begin] = rest > 0.0 ? static_cast<float>(rest) : 0.0f;
  }
  return {fixed_sum(residual, size), scale};
}

// Draws from max(target - draft, 0); returns -1 if it has no mass.
static int64_t draw_from_residual(const Sampled& target, const Sampled& draft, const DraftColumns& columns,
                                  double uniform, Executor executor, double* masses) {
  const int64_t shards = num_shards(target.row.vocab);
  const auto subtract = [&](int64_t shard, float* residual) {
    return columns.columns ? mapped_residual(target, draft, columns, shard, residual)
                           : shard_residual(target, draft, shard, residual);
  };
  for_shards(executor, shards, [&](int64_t shard) {
    alignas(64) float residual[SHARD];
    const ShardResidual whole = subtract(shard, residual);
    masses[shard] = whole.sum * whole.scale;
  });
  const double total = fixed_sum(masses, shards);
  if (!(total > 0.0 && total < __builtin_inf())) return -1;
  const Pick shard = pick(masses, shards, uniform * total);
  alignas(64) float residual[SHARD];
  const double scale = subtract(shard.index, residual).scale;
  const Pick entry = pick_entry(residual, shard_size(target.row, shard.index), shard.rest / scale);
  return shard.index * SHARD + entry.index;
}
