// The residual of two rows of logits, a shard at a time.

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

static float largest_of(const float* values, int64_t count) {
  float largest = -__builtin_inff();
#pragma omp simd reduction(max : largest)
  for (int64_t index = 0; index < count; ++index) largest = larger(values[index], largest);
  return largest;
}

// Copies the blocks of both rows in which a target entry weighs side by side; returns how many entries, padded.
static int64_t gather_blocks(const Sampled& target, const Sampled& draft, float bound, int64_t shard, float* targets,
                             float* drafts) {
  const int64_t end = shard * SHARD + shard_size(target.row, shard);
  int64_t count = 0;
  for (int64_t begin = shard * SHARD; begin < end; begin += BLOCK) {
    const int64_t size = end - begin < BLOCK ? end - begin : BLOCK;
    if (!target.row.adjusts() && measure_logits(target.row, begin, size).largest < bound) continue;
    widen(target.row, begin, size, targets + count);
    if (target.row.adjusts() && largest_of(targets + count, size) < bound) continue;
    widen(draft.row, begin, size, drafts + count);
    count += size;
  }
  pad_entries(false, count, drafts);
  return pad_entries(false, count, targets);
}

// Sum of a shard's residual.
static ShardResidual fast_residual(const Sampled& target, const Sampled& draft, const FastResidual& fast,
                                   int64_t shard) {
  if (!(target.statistics.shard_mass[shard] > 0.0)) return {0.0, fast.scale};
  const int64_t begin = shard * SHARD, count = shard_size(target.row, shard);
  alignas(64) float target_buffer[SHARD], draft_buffer[SHARD];
  if (fast.sparse) {
    const int64_t padded = gather_blocks(target, draft, fast.target_bound, shard, target_buffer, draft_buffer);
    return {sum_residual(FloatSource{target_buffer}, FloatSource{draft_buffer}, padded, fast, target.law.scale,
                         draft.law.scale),
            fast.scale};
  }
  if (reads_pairs(target.row) && reads_pairs(draft.row) && target.row.dtype == draft.row.dtype) {
    const uint16_t* targets = reinterpret_cast<const uint16_t*>(target.row.data) + begin;
    const uint16_t* drafts = reinterpret_cast<const uint16_t*>(draft.row.data) + begin;
    const auto sum = [&](auto target_source, auto draft_source) {
      return sum_residual_pairs(target, draft, target_source, draft_source, begin, count, fast);
    };
    if (target.row.dtype == DType::BFLOAT16) return {sum(Bfloat16Source{targets}, Bfloat16Source{drafts}), fast.scale};
    return {sum(Float16Source{targets}, Float16Source{drafts}), fast.scale};
  }
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
  const Entries target_entries = load_shard(target.row, shard, target_buffer);
  const Entries draft_entries = load_shard(draft.row, shard, draft_buffer);
  write_residual(target_entries.values, draft_entries.values, target_entries.padded, fast, target.law.scale,
                 draft.law.scale, residual);
  return {fixed_sum(residual, target_entries.padded), fast.scale};
}
