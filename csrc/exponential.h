// exp(difference / temperature) for differences <= 0 as 2^n * 2^r, in plain code for the compiler to vectorise.
//
// log2(e) / temperature is carried in two floats, so the error stays below 2 ulp down to subnormal results; -inf
// gives 0. NaN is judged elsewhere: it gives some number here.

struct ExponentialScale {
  float high;
  float low;
  // A variable on purpose: a literal makes the compiler split the loop at it.
  float lowest;
};

static inline ExponentialScale exponential_scale(double temperature) {
  const double scale = 1.4426950408889634 / temperature;
  const float high = static_cast<float>(scale);
  // 2^-160 rounds to 0, and -160 keeps the shifted exponent below in range.
  return {high, static_cast<float>(scale - high), -160.0f / high};
}

// One rounding where the hardware has a fused multiply-add; elsewhere float64 keeps the product exact.
SPECKER_INLINE float fused(float left, float right, float addend) {
#if SPECKER_HAS_FMA
  return __builtin_fmaf(left, right, addend);
#else
  return static_cast<float>(static_cast<double>(left) * right + addend);
#endif
}

// For polynomials, where a second rounding is harmless.
SPECKER_INLINE float multiply_add(float left, float right, float addend) {
#if SPECKER_HAS_FMA
  return __builtin_fmaf(left, right, addend);
#else
  return left * right + addend;
#endif
}

// 2^64 times the exponential: the exponent of a subnormal result stays normal until EXPONENT_SHIFT takes the factor
// back.
constexpr float EXPONENT_SHIFT = 0x1p-64f;

// Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits; 64 more keeps the exponent normal.
constexpr float MAGIC = 12582912.0f + 64.0f;

// NaN on the right passes, for sums that judge it; on the left it is dropped.
SPECKER_INLINE float larger(float left, float right) { return left > right ? left : right; }

// exp(value / temperature) * 2^64 / 2^n for the magic number MAGIC - n, |n| <= 2^20.
SPECKER_INLINE float shifted_power(float clamped, const ExponentialScale& scale, float magic) {
  const float shifted = multiply_add(clamped, scale.high, magic);
  const float integer = shifted - magic;
  const float fraction = fused(clamped, scale.low, fused(clamped, scale.high, -integer));
  float power = 0x1.41d308p-13f;
  power = multiply_add(power, fraction, 0x1.5f4568p-10f);
  power = multiply_add(power, fraction, 0x1.3b2dbcp-7f);
  power = multiply_add(power, fraction, 0x1.c6aed4p-5f);
  power = multiply_add(power, fraction, 0x1.ebfbdap-3f);
  power = multiply_add(power, fraction, 0x1.62e43p-1f);
  power = multiply_add(power, fraction, 1.0f);
  uint32_t power_bits, shifted_bits;
  __builtin_memcpy(&power_bits, &power, sizeof power);
  __builtin_memcpy(&shifted_bits, &shifted, sizeof shifted);
  power_bits += shifted_bits << 23;
  __builtin_memcpy(&power, &power_bits, sizeof power);
  return power;
}

SPECKER_INLINE float shifted_exponential(float difference, const ExponentialScale& scale) {
  return shifted_power(larger(scale.lowest, difference), scale, MAGIC);
}

SPECKER_INLINE float exponential(float difference, const ExponentialScale& scale) {
  // The one rounding of a subnormal result.
  return shifted_exponential(difference, scale) * EXPONENT_SHIFT;
}

// The same in float64, for masses that decide a filter; differences below -700 temperatures give 0, and
// small positive ones are as exact.
struct WideExponentialScale {
  double high;
  double low;
};

static inline WideExponentialScale wide_exponential_scale(double temperature) {
  const long double scale = 1.4426950408889634074L / temperature;
  const double high = static_cast<double>(scale);
  return {high, static_cast<double>(scale - high)};
}

SPECKER_INLINE double multiply_add(double left, double right, double addend) {
#if SPECKER_HAS_FMA
  return __builtin_fma(left, right, addend);
#else
  return left * right + addend;
#endif
}

SPECKER_INLINE double wide_exponential(double difference, const WideExponentialScale& scale) {
  constexpr double LN2 = 0.69314718055994530942;
  const double product = difference * scale.high;
  const double clamped = product > -1010.0 ? product : -1010.0;
  const double magic = 6755399441055744.0;
  const double shifted = clamped + magic;
  const double integer = shifted - magic;
  const double lost = multiply_add(difference, scale.high, -product) + difference * scale.low;
  const double rest = clamped == product ? lost : 0.0;
  const double fraction = ((clamped - integer) + rest) * LN2;
  // Taylor's series of e^x to the 13th power: |x| <= 0.35.
  double power = 1.0 / 6227020800.0;
  power = multiply_add(power, fraction, 1.0 / 479001600.0);
  power = multiply_add(power, fraction, 1.0 / 39916800.0);
  power = multiply_add(power, fraction, 1.0 / 3628800.0);
  power = multiply_add(power, fraction, 1.0 / 362880.0);
  power = multiply_add(power, fraction, 1.0 / 40320.0);
  power = multiply_add(power, fraction, 1.0 / 5040.0);
  power = multiply_add(power, fraction, 1.0 / 720.0);
  power = multiply_add(power, fraction, 1.0 / 120.0);
  power = multiply_add(power, fraction, 1.0 / 24.0);
  power = multiply_add(power, fraction, 1.0 / 6.0);
  power = multiply_add(power, fraction, 0.5);
  power = multiply_add(power, fraction, 1.0);
  power = multiply_add(power, fraction, 1.0);
  uint64_t power_bits, shifted_bits;
  __builtin_memcpy(&power_bits, &power, sizeof power);
  __builtin_memcpy(&shifted_bits, &shifted, sizeof shifted);
  power_bits += shifted_bits << 52;
  __builtin_memcpy(&power, &power_bits, sizeof power);
  return product > -1010.0 ? power : 0.0;
}
