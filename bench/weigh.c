/* What a verify round cannot avoid: each logit it must read, once, with one vectorised exponential. Nothing else.
   The exponential is 2^n * 2^r with the accuracy that verify has, 2 ulp, for logits of ordinary size. */
#include <stdint.h>
#include <string.h>

static inline float exponential(float logit) {
  const float high = 0x1.715476p+0f, low = 0x1.4ae0bep-26f, magic = 12582912.0f;
  const float shifted = __builtin_fmaf(logit, high, magic);
  const float integer = shifted - magic;
  const float fraction = __builtin_fmaf(logit, low, __builtin_fmaf(logit, high, -integer));
  float power = 0x1.41d308p-13f;
  power = __builtin_fmaf(power, fraction, 0x1.5f4568p-10f);
  power = __builtin_fmaf(power, fraction, 0x1.3b2dbcp-7f);
  power = __builtin_fmaf(power, fraction, 0x1.c6aed4p-5f);
  power = __builtin_fmaf(power, fraction, 0x1.ebfbdap-3f);
  power = __builtin_fmaf(power, fraction, 0x1.62e43p-1f);
  power = __builtin_fmaf(power, fraction, 1.0f);
  uint32_t bits, exponent;
  memcpy(&bits, &power, sizeof bits);
  memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;
  memcpy(&power, &bits, sizeof power);
  return power;
}

double weigh_float32(const float *logits, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t index = 0; index < count; ++index) sum += exponential(logits[index]);
  return (double)sum;
}

double weigh_bfloat16(const uint16_t *logits, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t index = 0; index < count; ++index) {
    const uint32_t bits = (uint32_t)logits[index] << 16;
    float logit;
    memcpy(&logit, &bits, sizeof logit);
    sum += exponential(logit);
  }
  return (double)sum;
}
