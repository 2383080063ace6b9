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

// Two rows of logits by weights relative to the rows' largest, so one ratio serves all shards, and equal rows leave
// nothing. What the target leaves out has no residual, whatever the draft row holds: masked entries are never drawn.
struct FastResidual {
  float target_max;
  float draft_max;
  float target_bound;
  float draft_bound;
  ScaleRatio ratio;
  double scale;
  bool sparse;  // top-k and its like leave chunks without a target entry
};

// Powers of two below the row's largest weight from which a shard is subtracted in units of its own.
constexpr float NEAR_EXPONENT = 100.0f;

static bool make_fast_residual(const Sampled& target, const Sampled& draft, FastResidual* fast) {
  if (target.law.weighing != Weighing::EXPONENTIAL || draft.law.weighing != Weighing::EXPONENTIAL) return false;
  const double scale = 1.0 / target.statistics.weight_sum;
  fast->target_max = static_cast<float>(target.statistics.row_max);
  fast->draft_max = static_cast<float>(draft.statistics.row_max);
  fast->target_bound = larger(target.statistics.float_threshold, fast->target_max + target.law.scale.lowest);
  fast->draft_bound = larger(draft.statistics.float_threshold, fast->draft_max + draft.law.scale.lowest);
  fast->ratio = scale_ratio(1.0 / draft.statistics.weight_sum / scale);
  fast->scale = scale * EXPONENT_SHIFT;
  fast->sparse = target.parameters.filtered;
  return true;
}

static bool is_near(const Sampled& target, int64_t shard) {
  const float difference = target.statistics.shard_largest[shard] - static_cast<float>(target.statistics.row_max);
  return difference * target.law.scale.high > -NEAR_EXPONENT;
}

SPECKER_INLINE float fast_residual_of(float target, float draft, const FastResidual& fast,
                                      const ExponentialScale& target_scale, const ExponentialScale& draft_scale) {
  const float difference = draft - fast.draft_max;
  // A row that its receipt is not of may hold more than the receipt's largest value.
  const float draft_weight = shifted_power(difference < 0.0f ? difference : 0.0f, draft_scale, MAGIC);
  const float target_weight = shifted_power(target - fast.target_max, target_scale, MAGIC);
  const float residual = residual_of(target_weight, draft >= fast.draft_bound ? draft_weight : 0.0f, fast.ratio);
  return target >= fast.target_bound ? residual : 0.0f;
}

// Sums the residual of whole chunks; chunks without a target entry that weighs have none.
template <class Source>
static double sum_residual(const Source& target, const Source& draft, int64_t padded, const FastResidual fast,
                           const ExponentialScale target_scale, const ExponentialScale draft_scale) {
  double lanes[LANES] = {};
  for (int64_t begin = 0; begin < padded; begin += CHUNK) {
    if (fast.sparse && !(largest_of_chunk(Source{target.values + begin}) >= fast.target_bound)) continue;
#pragma omp simd
    for (int64_t lane = 0; lane < HALF; ++lane) {
      float sum = 0.0f, rest = 0.0f;
#pragma GCC unroll 8
      for (int64_t part = 0; part < CHUNK; part += LANES) {
        float first_target, second_target, first_draft, second_draft;
        Source::pair(target.values + begin + part, lane, &first_target, &second_target);
        Source::pair(draft.values + begin + part, lane, &first_draft, &second_draft);
        sum += fast_residual_of(first_target, first_draft, fast, target_scale, draft_scale);
        rest += fast_residual_of(second_target, second_draft, fast, target_scale, draft_scale);
      }
      lanes[lane] += static_cast<double>(sum), lanes[HALF + lane] += static_cast<double>(rest);
    }
  }
  return sum_of_lanes<LANES>(lanes);
}

template <class Source>
static double sum_residual_pairs(const Sampled& target, const Sampled& draft, const Source& target_source,
                                 const Source& draft_source, int64_t begin, int64_t count, const FastResidual& fast) {
  const ExponentialScale target_scale = target.law.scale, draft_scale = draft.law.scale;
  const int64_t rest = count % CHUNK, whole = count - rest;
  const double sum = sum_residual(target_source, draft_source, whole, fast, target_scale, draft_scale);
  if (rest == 0) return sum;
  alignas(64) float target_buffer[CHUNK], draft_buffer[CHUNK];
  const Entries target_entries = load_entries(target.row, begin + whole, begin + count, target_buffer);
  const Entries draft_entries = load_entries(draft.row, begin + whole, begin + count, draft_buffer);
  return sum + sum_residual(FloatSource{target_entries.values}, FloatSource{draft_entries.values}, CHUNK, fast,
                            target_scale, draft_scale);
}

// Sum of a shard's residual.
static ShardResidual fast_residual(const Sampled& target, const Sampled& draft, const FastResidual& fast,
                                   int64_t shard) {
  if (!(target.statistics.shard_mass[shard] > 0.0)) return {0.0, fast.scale};
  const int64_t begin = shard * SHARD, count = shard_size(target.row, shard);
  if (reads_pairs(target.row) && reads_pairs(draft.row) && target.row.dtype == draft.row.dtype) {
    const uint16_t* targets = reinterpret_cast<const uint16_t*>(target.row.data) + begin;
    const uint16_t* drafts = reinterpret_cast<const uint16_t*>(draft.row.data) + begin;
    const auto sum = [&](auto target_source, auto draft_source) {
      return sum_residual_pairs(target, draft, target_source, draft_source, begin, count, fast);
    };
    if (target.row.dtype == DType::BFLOAT16) return {sum(Bfloat16Source{targets}, Bfloat16Source{drafts}), fast.scale};
    return {sum(Float16Source{targets}, Float16Source{drafts}), fast.scale};
  }
  alignas(64) float target_buffer[SHARD], draft_buffer[SHARD];
  const Entries target_entries = load_shard(target.row, shard, target_buffer);
  const Entries draft_entries = load_shard(draft.row, shard, draft_buffer);
  return {sum_residual(FloatSource{target_entries.values}, FloatSource{draft_entries.values}, target_entries.padded,
                       fast, target.law.scale, draft.law.scale),
          fast.scale};
}

// Entries of a shard's residual.
static ShardResidual write_fast_residual(const Sampled& target, const Sampled& draft, const FastResidual& fast,
                                         int64_t shard, float* residual) {
  alignas(64) float target_buffer[SHARD], draft_buffer[SHARD];
  const ExponentialScale target_scale = target.law.scale, draft_scale = draft.law.scale;
  const Entries target_entries = load_shard(target.row, shard, target_buffer);
  const Entries draft_entries = load_shard(draft.row, shard, draft_buffer);
#pragma omp simd
  for (int64_t index = 0; index < target_entries.padded; ++index) {
    residual[index] =
        fast_residual_of(target_entries.values[index], draft_entries.values[index], fast, target_scale, draft_scale);
  }
  return {fixed_sum(residual, target_entries.padded), fast.scale};
}
