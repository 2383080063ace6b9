// The residual of whole chunks, in plain loops for the compiler to vectorise.

SPECKER_INLINE float fast_residual_of(float target, float draft, const FastResidual& fast, const ScaleRatio& ratio,
                                      const ExponentialScale& target_scale, const ExponentialScale& draft_scale) {
  const float difference = draft - fast.draft_origin;
  // A row that its receipt is not of may hold more than the receipt's largest value.
  const float draft_weight = shifted_power(difference < 0.0f ? difference : 0.0f, draft_scale, MAGIC);
  const float target_weight = shifted_power(target - fast.target_origin, target_scale, MAGIC);
  const float residual = residual_of(target_weight, draft >= fast.draft_bound ? draft_weight : 0.0f, ratio);
  return target >= fast.target_bound ? residual : 0.0f;
}

// Sums the residual of whole chunks.
template <class Source>
static double sum_residual(const Source& target, const Source& draft, int64_t padded, const FastResidual fast,
                           const ExponentialScale target_scale, const ExponentialScale draft_scale) {
  const ScaleRatio ratio = scale_ratio(fast.ratio);
  double lanes[LANES] = {};
  for (int64_t begin = 0; begin < padded; begin += CHUNK) {
#pragma omp simd
    for (int64_t lane = 0; lane < HALF; ++lane) {
      float sum = 0.0f, rest = 0.0f;
#pragma GCC unroll 8
      for (int64_t part = 0; part < CHUNK; part += LANES) {
        float first_target, second_target, first_draft, second_draft;
        Source::pair(target.values + begin + part, lane, &first_target, &second_target);
        Source::pair(draft.values + begin + part, lane, &first_draft, &second_draft);
        sum += fast_residual_of(first_target, first_draft, fast, ratio, target_scale, draft_scale);
        rest += fast_residual_of(second_target, second_draft, fast, ratio, target_scale, draft_scale);
      }
      lanes[lane] += static_cast<double>(sum), lanes[HALF + lane] += static_cast<double>(rest);
    }
  }
  return sum_of_lanes<LANES>(lanes);
}

// Writes the residual of whole chunks.
static void write_residual(const float* target, const float* draft, int64_t padded, const FastResidual fast,
                           const ExponentialScale target_scale, const ExponentialScale draft_scale, float* residual) {
  const ScaleRatio ratio = scale_ratio(fast.ratio);
#pragma omp simd
  for (int64_t index = 0; index < padded; ++index) {
    residual[index] = fast_residual_of(target[index], draft[index], fast, ratio, target_scale, draft_scale);
  }
}
