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
  kept_weights(sampled.law, load_shard(sampled.row, shard, buffer), largest, sampled.statistics.float_threshold,
               weights);
}

// Scale of a shard's weights to probabilities.
static inline double shard_scale(const Sampled& sampled, double reference) {
  return relative_weight(sampled.law, reference, sampled.statistics.row_max) / sampled.statistics.weight_sum;
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
