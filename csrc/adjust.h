// What changes a row as it is loaded: entries of a sparse bias, and an allowed-token mask.

struct Adjustment {
  const int64_t* token_ids;  // ascending
  const float* values;
  int64_t count;
  const int32_t* allowed;  // one bit a token; null allows everything
};

static inline Adjustment adjustment_at(const Adjustments& adjustments, int64_t sequence, int64_t index) {
  Adjustment adjustment = {nullptr, nullptr, 0, nullptr};
  if (adjustments.bias_offsets) {
    const int64_t begin = adjustments.bias_offsets[sequence];
    adjustment.token_ids = adjustments.bias_token_ids + begin;
    adjustment.values = adjustments.bias_values + begin;
    adjustment.count = adjustments.bias_offsets[sequence + 1] - begin;
  }
  if (adjustments.allowed_tokens) {
    adjustment.allowed = adjustments.allowed_tokens + sequence * adjustments.allowed_stride_sequence +
                         index * adjustments.allowed_stride_row;
  }
  return adjustment;
}

// The first of `count` ascending ids that is not below `wanted`.
static inline int64_t lower_bound(const int64_t* ids, int64_t count, int64_t wanted) {
  int64_t low = 0;
  while (count > 0) {
    const int64_t half = count / 2;
    if (ids[low + half] < wanted) {
      low += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

static void forbid_entries(const int32_t* allowed, float forbidden, int64_t begin, int64_t count, float* values) {
  constexpr int64_t WORD = 32;
  int64_t index = 0;
  while (index < count) {
    const int64_t token = begin + index, lane = token % WORD;
    const int64_t width = count - index < WORD - lane ? count - index : WORD - lane;
    const uint32_t bits = static_cast<uint32_t>(allowed[token / WORD]) >> lane;
#pragma omp simd
    for (int64_t part = 0; part < width; ++part) {
      values[index + part] = (bits >> part) & 1u ? values[index + part] : forbidden;
    }
    index += width;
  }
}

// Adjusts the widened entries [begin, begin + count): biases one after another in float32, then the mask.
static void adjust_entries(const Adjustment& adjustment, bool is_probs, int64_t begin, int64_t count, float* values) {
  int64_t entry = lower_bound(adjustment.token_ids, adjustment.count, begin);
  for (; entry < adjustment.count && adjustment.token_ids[entry] < begin + count; ++entry) {
    float& value = values[adjustment.token_ids[entry] - begin];
    const float bias = adjustment.values[entry];
    value = is_probs ? value * static_cast<float>(exp(static_cast<double>(bias))) : value + bias;
  }
  if (adjustment.allowed) {
    forbid_entries(adjustment.allowed, is_probs ? 0.0f : -__builtin_inff(), begin, count, values);
  }
}
