// The residual max(target - draft, 0) of a shard.

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
  const float draft_threshold = draft.statistics.float_threshold;
  kept_weights(target.law, target_entries, target_largest, target.statistics.float_threshold, residual);
  if (!(draft_largest > (draft.row.is_probs ? 0.0f : -__builtin_inff()) && draft_largest >= draft_threshold)) {
    return {fixed_sum(residual, target_entries.padded), scale};
  }
  const ScaleRatio ratio = scale_ratio(shard_scale(draft, draft_largest) / scale);
  kept_weights(draft.law, draft_entries, draft_largest, draft_threshold, draft_weights);
  return {subtract_weights(draft_weights, target_entries.padded, ratio, residual), scale};
}

// Two rows of logits by weights in units of the whole row, so one ratio serves all shards, and equal rows leave
// nothing. What the target leaves out has no residual, whatever the draft row holds: masked entries are never drawn.
struct FastResidual {
  bool is_relative;  // the origins are subtracted from the entries; else they are 0, and the exponents are not
  float target_origin;
  float draft_origin;
  float target_exponent;
  float draft_exponent;
  float draft_ceiling;  // the row's largest value, less its origin
  float target_bound;
  float draft_bound;
  double ratio;
  double scale;
  bool sparse;  // top-k and its like leave blocks without a target entry
};

// Powers of two below the row's largest weight from which a shard is subtracted in units of its own.
constexpr float NEAR_EXPONENT = 100.0f;

// The least entry that weighs. Rounded up: a float32 below may leave the exponents of a weight.
static inline float weighing_bound(const Sampled& sampled, float largest) {
  const double bound = static_cast<double>(largest) + sampled.law.scale.lowest;
  return larger(sampled.statistics.float_threshold, ceil_to_float(bound));
}

// By how much the masses of rows that differ by a constant may differ: they are sums of float32 weights.
constexpr double NEARLY_EQUAL = 0x1p-21;

// Mass of a row in units of 2^exponent.
static inline double mass_of(const Sampled& sampled, float exponent) {
  const double reference = reference_of(exponent, sampled.law);
  return sampled.statistics.weight_sum * relative_weight(sampled.law, sampled.statistics.row_max, reference);
}

static bool make_fast_residual(const Sampled& target, const Sampled& draft, FastResidual* fast) {
  if (target.law.weighing != Weighing::EXPONENTIAL || draft.law.weighing != Weighing::EXPONENTIAL) return false;
  const float target_max = static_cast<float>(target.statistics.row_max);
  const float draft_max = static_cast<float>(draft.statistics.row_max);
  fast->target_bound = weighing_bound(target, target_max);
  fast->draft_bound = weighing_bound(draft, draft_max);
  double target_mass = target.statistics.weight_sum, draft_mass = draft.statistics.weight_sum;
  // The largest weights of two peaks have to be 1 both, which they are relative to themselves, and rows that differ by
  // a constant have equal differences to their largest values.
  fast->is_relative = !WEIGHS_BY_EXPONENT || target_mass < NEARLY_ONE || draft_mass < NEARLY_ONE ||
                      (target_max != draft_max && fabs(target_mass - draft_mass) <= NEARLY_EQUAL * target_mass) ||
                      !exponent_of(target.law, target_max, &fast->target_exponent) ||
                      !exponent_of(draft.law, draft_max, &fast->draft_exponent);
  if (fast->is_relative) {
    fast->target_exponent = fast->draft_exponent = fast->draft_ceiling = 0.0f;
    fast->target_origin = target_max, fast->draft_origin = draft_max;
  } else {
    fast->target_origin = fast->draft_origin = 0.0f;
    fast->draft_ceiling = draft_max;
    target_mass = mass_of(target, fast->target_exponent), draft_mass = mass_of(draft, fast->draft_exponent);
  }
  fast->ratio = target_mass / draft_mass;
  if (fast->is_relative && fabs(fast->ratio - 1.0) <= NEARLY_EQUAL) fast->ratio = 1.0;
  fast->scale = EXPONENT_SHIFT / target_mass;
  fast->sparse = target.parameters.filtered;
  // Only a receipt of another row leaves this range, in which weights stay normal numbers.
  return fast->ratio > 0x1p-30 && fast->ratio < 0x1p30;
}

static bool is_near(const Sampled& target, int64_t shard) {
  const float difference = target.statistics.shard_largest[shard] - static_cast<float>(target.statistics.row_max);
  return difference * target.law.scale.high > -NEAR_EXPONENT;
}
