// Emission by inverse CDF: the uniform picks a shard by the prefix of the shards' masses, then an id inside it.
//
// An id without mass is never emitted: a uniform of 0 gives the first id with mass, a prefix that ends short the last.

// A row with what its distribution is made of.
struct Sampled {
  Row row;
  Law law;
  Parameters parameters;
  RowStatistics statistics;
};

struct Pick {
  int64_t index;  // -1 if nothing has mass
  double rest;    // what of the wanted mass lies inside the picked entry
};

// The first entry whose prefix exceeds `wanted`, else the last with mass.
template <class Mass>
static Pick pick(const Mass* masses, int64_t count, double wanted) {
  Pick picked = {-1, 0.0};
  double prefix = 0.0;
  for (int64_t index = 0; index < count; ++index) {
    if (!(masses[index] > 0)) continue;
    picked = {index, wanted - prefix};
    prefix += masses[index];
    if (prefix > wanted) break;
  }
  return picked;
}

// The same for the weights of a shard, 64 at a time.
static Pick pick_entry(const float* weights, int64_t count, double wanted) {
  double sums[SHARD / LANES];
  for (int64_t begin = 0; begin < count; begin += LANES) {
    sums[begin / LANES] = fixed_sum(weights + begin, count - begin < LANES ? count - begin : LANES);
  }
  const Pick part = pick(sums, ceil_div(count, LANES), wanted);
  const int64_t begin = part.index * LANES;
  const Pick entry = pick(weights + begin, count - begin < LANES ? count - begin : LANES, part.rest);
  return {begin + entry.index, entry.rest};
}

static void shard_weights(const Sampled& sampled, int64_t shard, float largest, float* weights) {
  alignas(64) float buffer[SHARD];
  kept_weights(sampled.law, load_shard(sampled.row, shard, buffer), largest,
               sampled.statistics.float_threshold, weights);
}

// Scale of a shard's weights to probabilities.
static inline double shard_scale(const Sampled& sampled, float largest) {
  return relative_weight(sampled.law, largest, sampled.statistics.row_max) /
         sampled.statistics.weight_sum;
}

static inline int64_t shard_size(const Row& row, int64_t shard) {
  const int64_t rest = row.vocab - shard * SHARD;
  return rest < SHARD ? rest : SHARD;
}

// Draws from the row itself, whose shard masses are known: one shard is read.
static int64_t draw_from_row(const Sampled& sampled, double uniform) {
  if (sampled.parameters.greedy) return sampled.statistics.argmax;
  const int64_t shards = num_shards(sampled.row.vocab);
  const double* masses = sampled.statistics.shard_mass;
  const Pick shard = pick(masses, shards, uniform * fixed_sum(masses, shards));
  const float largest = sampled.statistics.shard_largest[shard.index];
  alignas(64) float weights[SHARD];
  shard_weights(sampled, shard.index, largest, weights);
  const double scale = shard_scale(sampled, largest) * sampled.statistics.weight_sum;
  const Pick entry = pick_entry(weights, shard_size(sampled.row, shard.index), shard.rest / scale);
  return shard.index * SHARD + entry.index;
}

// Draws from the row with one token removed; returns -1 if nothing else has mass.
static int64_t draw_without(const Sampled& sampled, int64_t removed, double uniform, double* masses) {
  const int64_t shards = num_shards(sampled.row.vocab), removed_shard = removed / SHARD;
  for (int64_t shard = 0; shard < shards; ++shard) masses[shard] = sampled.statistics.shard_mass[shard];
  alignas(64) float weights[SHARD];
  const auto weigh_shard = [&](int64_t shard) {
    const float largest = sampled.statistics.shard_largest[shard];
    shard_weights(sampled, shard, largest, weights);
    if (shard == removed_shard) weights[removed - shard * SHARD] = 0.0f;
    return shard_scale(sampled, largest) * sampled.statistics.weight_sum;
  };
  if (masses[removed_shard] > 0.0) {
    const double scale = weigh_shard(removed_shard);
    masses[removed_shard] = fixed_sum(weights, shard_size(sampled.row, removed_shard)) * scale;
  }
  const double total = fixed_sum(masses, shards);
  if (!(total > 0.0 && total < __builtin_inf())) return -1;
  const Pick shard = pick(masses, shards, uniform * total);
  const double scale = weigh_shard(shard.index);
  const Pick entry = pick_entry(weights, shard_size(sampled.row, shard.index), shard.rest / scale);
  return shard.index * SHARD + entry.index;
}

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
    fetch_ahead(target_entries, target_entries.values + begin);
    fetch_ahead(draft_entries, draft_entries.values + begin);
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

// Draws from max(target - draft, 0); returns -1 if it has no mass.
static int64_t draw_from_residual(const Sampled& target, const Sampled& draft, double uniform, Executor executor,
                                  double* masses) {
  const int64_t shards = num_shards(target.row.vocab);
  for_shards(executor, shards, [&](int64_t shard) {
    alignas(64) float residual[SHARD];
    const ShardResidual whole = shard_residual(target, draft, shard, residual);
    masses[shard] = whole.sum * whole.scale;
  });
  const double total = fixed_sum(masses, shards);
  if (!(total > 0.0 && total < __builtin_inf())) return -1;
  const Pick shard = pick(masses, shards, uniform * total);
  alignas(64) float residual[SHARD];
  const double scale = shard_residual(target, draft, shard.index, residual).scale;
  const Pick entry = pick_entry(residual, shard_size(target.row, shard.index), shard.rest / scale);
  return shard.index * SHARD + entry.index;
}
