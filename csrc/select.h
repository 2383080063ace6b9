// Selection without sorting: from values with measures, and over the order of float32.

static inline uint32_t order_of(float value) {
  // Adding 0 makes -0 and 0 one value.
  const float canonical = value + 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &canonical, sizeof bits);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

static inline float value_of(uint32_t order) {
  return float_from_bits(order ^ (order >> 31 ? 0x80000000u : 0xffffffffu));
}

// The least float32 that is not below a float64.
static inline float ceil_to_float(double value) {
  const float nearest = static_cast<float>(value);
  return static_cast<double>(nearest) < value ? nextafterf(nearest, __builtin_inff()) : nearest;
}

static inline float floor_to_float(double value) {
  const float nearest = static_cast<float>(value);
  return static_cast<double>(nearest) > value ? nextafterf(nearest, -__builtin_inff()) : nearest;
}

static inline float median(float first, float second, float third) {
  const float low = first < second ? first : second;
  const float high = first < second ? second : first;
  return third < low ? low : third > high ? high : third;
}

static inline void swap_entries(float* values, double* measures, int64_t left, int64_t right) {
  const float value = values[left];
  const double measure = measures[left];
  values[left] = values[right], measures[left] = measures[right];
  values[right] = value, measures[right] = measure;
}

struct Selection {
  float value;
  double above;    // measure of what is larger than the value
  double reached;  // the same with what equals it
};

// The largest value whose entries >= it, with `above` from others larger still, reach `wanted`; else the least value.
static Selection select(float* values, double* measures, int64_t count, double above, double wanted) {
  int64_t begin = 0, end = count;
  while (true) {
    const float pivot = median(values[begin], values[begin + (end - begin) / 2], values[end - 1]);
    // [begin, greater) is above the pivot, [greater, next) equals it, [less, end) is below it.
    int64_t greater = begin, next = begin, less = end;
    double greater_measure = 0.0, equal_measure = 0.0;
    while (next < less) {
      if (values[next] > pivot) {
        greater_measure += measures[next];
        swap_entries(values, measures, greater++, next++);
      } else if (values[next] < pivot) {
        swap_entries(values, measures, next, --less);
      } else {
        equal_measure += measures[next++];
      }
    }
    if (greater > begin && above + greater_measure >= wanted) {
      end = greater;
    } else if (less == end || above + greater_measure + equal_measure >= wanted) {
      return {pivot, above + greater_measure, above + greater_measure + equal_measure};
    } else {
      above += greater_measure + equal_measure;
      begin = less;
    }
  }
}
