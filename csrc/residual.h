// Draws from the residual max(target - draft, 0), where draft columns may stand for target ids.

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
  FastResidual fast;
  const bool is_fast = !columns.columns && make_fast_residual(target, draft, &fast);
  const auto subtract = [&](int64_t shard, float* residual) {
    if (is_fast && is_near(target, shard)) return write_fast_residual(target, draft, fast, shard, residual);
    return columns.columns ? mapped_residual(target, draft, columns, shard, residual)
                           : shard_residual(target, draft, shard, residual);
  };
  for_shards(executor, shards, [&](int64_t shard) {
    alignas(64) float residual[SHARD];
    const ShardResidual whole =
        is_fast && is_near(target, shard) ? fast_residual(target, draft, fast, shard) : subtract(shard, residual);
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
