// Emission by inverse CDF: the uniform picks a shard by the prefix of the shards' masses, then an id by a scan inside it.
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

static double total_mass(const double* masses, int64_t count) {
  double total = 0.0;
  for (int64_t index = 0; index < count; ++index) total += masses[index];
  return total;
}

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
  const Pick shard = pick(masses, shards, uniform * total_mass(masses, shards));
  const float largest = sampled.statistics.shard_largest[shard.index];
  alignas(64) float weights[SHARD];
  shard_weights(sampled, shard.index, largest, weights);
  const double scale = shard_scale(sampled, largest) * sampled.statistics.weight_sum;
  const Pick entry = pick(weights, shard_size(sampled.row, shard.index), shard.rest / scale);
  return shard.index * SHARD + entry.index;
}

static double sum_of_weights(const float* weights, int64_t count) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t index = 0; index < count; ++index) sum += static_cast<double>(weights[index]);
  return sum;
}

// Draws from the row with one token removed; returns -1 if nothing else has mass.
static int64_t draw_without(const Sampled& sampled, int64_t removed, double uniform, double* masses) {
  const int64_t shards = num_shards(sampled.row.vocab), removed_shard = removed / SHARD;
  for (int64_t shard = 0; shard < shards; ++shard) masses[shard] = sampled.statistics.shard_mass[shard];
  alignas(64) float weights[SHARD];
  int64_t weighed = -1;
  const auto weigh_shard = [&](int64_t shard) {
    const float largest = sampled.statistics.shard_largest[shard];
    shard_weights(sampled, shard, largest, weights);
    if (shard == removed_shard) weights[removed - shard * SHARD] = 0.0f;
    weighed = shard;
    return shard_scale(sampled, largest) * sampled.statistics.weight_sum;
  };
  if (masses[removed_shard] > 0.0) {
    const double scale = weigh_shard(removed_shard);
    masses[removed_shard] = sum_of_weights(weights, shard_size(sampled.row, removed_shard)) * scale;
  }
  const double total = total_mass(masses, shards);
  if (!(total > 0.0 && total < __builtin_inf())) return -1;
  const Pick shard = pick(masses, shards, uniform * total);
  const double scale = weigh_shard(shard.index);
  const Pick entry = pick(weights, shard_size(sampled.row, shard.index), shard.rest / scale);
  return shard.index * SHARD + entry.index;
}

// Writes max(target - draft, 0) of a shard, in units of the scale that is returned; 0 if the target has no mass there.
static double shard_residual(const Sampled& target, const Sampled& draft, int64_t shard, float* residual) {
  if (!(target.statistics.shard_mass[shard] > 0.0)) return 0.0;
  const float target_largest = target.statistics.shard_largest[shard];
  const double scale = shard_scale(target, target_largest);
  if (!(scale > 0.0)) return 0.0;
  alignas(64) float buffer[SHARD], draft_weights[SHARD];
  shard_weights(target, shard, target_largest, residual);
  const Entries entries = load_shard(draft.row, shard, buffer);
  const float draft_largest = measure_entries(draft.row, entries).largest;
  if (!(draft_largest > (draft.row.is_probs ? 0.0f : -__builtin_inff()))) return scale;
  kept_weights(draft.law, entries, draft_largest, draft.statistics.float_threshold,
               draft_weights);
  // In two floats, and exactly 1 for equal rows, whose residual is then exactly 0. Capped: 0 * inf would be NaN.
  const double ratio = shard_scale(draft, draft_largest) / scale;
  const float high = ratio < 1e38 ? static_cast<float>(ratio) : 1e38f;
  const float low = ratio < 1e38 ? static_cast<float>(ratio - high) : 0.0f;
#pragma omp simd
  for (int64_t index = 0; index < entries.padded; ++index) {
    const float rest = fused(-draft_weights[index], low, fused(-draft_weights[index], high, residual[index]));
    residual[index] = rest > 0.0f ? rest : 0.0f;
  }
  return scale;
}

// Draws from max(target - draft, 0); returns -1 if it has no mass.
static int64_t draw_from_residual(const Sampled& target, const Sampled& draft, double uniform, Executor executor,
                                  double* masses) {
  const int64_t shards = num_shards(target.row.vocab);
  for_shards(executor, shards, [&](int64_t shard) {
    alignas(64) float residual[SHARD];
    const double scale = shard_residual(target, draft, shard, residual);
    masses[shard] = scale > 0.0 ? scale * sum_of_weights(residual, shard_size(target.row, shard)) : 0.0;
  });
  const double total = total_mass(masses, shards);
  if (!(total > 0.0 && total < __builtin_inf())) return -1;
  const Pick shard = pick(masses, shards, uniform * total);
  alignas(64) float residual[SHARD];
  const double scale = shard_residual(target, draft, shard.index, residual);
  const Pick entry = pick(residual, shard_size(target.row, shard.index), shard.rest / scale);
  return shard.index * SHARD + entry.index;
}
