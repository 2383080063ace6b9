// What an engine holds, as `verify` takes it: the first part of `verify_into`. Included by operators.cpp alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensors.h"

namespace specker {
namespace {

// Accept uniforms of every position and one emission uniform a sequence, side by side as `verify` takes them.
Tensor paired_uniforms(const Tensor& accept, const Tensor& emission, int64_t batch, int64_t gamma) {
  STD_TORCH_CHECK(accept.size(1) >= gamma, "accept_uniforms: expected a column a draft token");
  const Reals accepts = reals(accept, "accept_uniforms"), emissions = reals(emission, "emission_uniforms");
  int64_t sizes[] = {batch, gamma + 1, 2}, strides[] = {2 * (gamma + 1), 2, 1};
  Tensor uniforms = allocate(3, sizes, strides, aoti_torch_dtype_float64());
  double* pairs = data_of<double>(uniforms);
  for (int64_t sequence = 0; sequence < batch; ++sequence) {
    for (int64_t index = 0; index <= gamma; ++index) {
      const int64_t offset = sequence * accept.stride(0) + index * accept.stride(1);
      // The bonus row has no acceptance.
      *pairs++ = index == gamma ? 0.0 : real_at(accepts, offset);
      *pairs++ = real_at(emissions, sequence * emission.stride(0));
    }
  }
  return uniforms;
}

// What an engine tells of its laws, one number a sequence: target rows are tempered already, final probabilities too.
struct Laws {
  Tensor temperature;
  Tensor draft_temperature;
  OptionalTensor seed;
};

Laws engine_laws(const OptionalTensor& temperature, const OptionalTensor& seed, const OptionalTensor& slots,
                 int64_t batch, bool draft_is_probs) {
  const int32_t real = aoti_torch_dtype_float64();
  if (!temperature) {
    const Tensor one = allocate({1}, real);
    *data_of<double>(one) = 1.0;
    return {one, one, seed};
  }
  const Reals held = reals(temperature, "temperature");
  const Integers places = integers(slots, "slots"), seeds = integers(seed, "seed");
  const int64_t count = std::min(temperature->size(0), seed ? seed->size(0) : INT64_MAX);
  const Laws laws = {allocate({batch}, real), allocate({batch}, real),
                     slots && seed ? allocate({batch}, aoti_torch_dtype_int64()) : seed};
  for (int64_t sequence = 0; sequence < batch; ++sequence) {
    const int64_t slot = slots ? integer_at(places, sequence * places.stride) : sequence;
    const bool inside = !slots || (slot >= 0 && slot < count);
    const double value = inside ? real_at(held, slot * held.stride) : std::numeric_limits<double>::quiet_NaN();
    const double left = value < GREEDY_TEMPERATURE ? 0.0 : 1.0;
    data_of<double>(laws.temperature)[sequence] = value >= 0.0 && std::isfinite(value) ? left : value;
    data_of<double>(laws.draft_temperature)[sequence] = draft_is_probs ? 1.0 : value;
    if (slots && seed) data_of<int64_t>(*laws.seed)[sequence] = inside ? integer_at(seeds, slot * seeds.stride) : 0;
  }
  return laws;
}

// Draft tokens of a chain of slots, -1 where a slot has two children or the chain leaves one out.
int64_t chain_length(const Cells& children, const Cells& siblings, int64_t sequence, int64_t slots) {
  int64_t length = slots - 1;
  if (children.data) {
    length = 0;
    while (length < slots && cell_at(children, sequence, length) == length + 1) ++length;
    if (length == slots || cell_at(children, sequence, length) != -1) return -1;
  }
  for (int64_t slot = 0; siblings.data && slot <= length; ++slot) {
    if (cell_at(siblings, sequence, slot) != -1) return -1;
  }
  return length;
}

Tensor chain_lengths(const OptionalTensor& next_tokens, const OptionalTensor& next_siblings) {
  const Cells children = cells(next_tokens, "next_tokens"), siblings = cells(next_siblings, "next_siblings");
  const Tensor& links = next_tokens ? *next_tokens : *next_siblings;
  const Tensor lengths = allocate({links.size(0)}, aoti_torch_dtype_int64());
  for (int64_t sequence = 0; sequence < links.size(0); ++sequence) {
    data_of<int64_t>(lengths)[sequence] = chain_length(children, siblings, sequence, links.size(1));
  }
  return lengths;
}

struct Drafts {
  Tensor token_ids;
  OptionalTensor bounds;
  OptionalTensor position;
};

// Drafts from one element a target row: the first of a sequence is the token before them, and their first position.
Drafts without_roots(const Tensor& token_ids, const Tensor& cu_num_rows, const OptionalTensor& position) {
  const int64_t rows = token_ids.size(0), batch = cu_num_rows.size(0) - 1, total = std::max<int64_t>(rows - batch, 0);
  const int32_t int64 = aoti_torch_dtype_int64();
  const Drafts drafts = {allocate({total}, int64), allocate({batch + 1}, int64),
                         position ? allocate({batch}, int64) : position};
  const Integers tokens = integers(token_ids, "draft_token_ids"), positions = integers(position, "position");
  const Integers row_bounds = integers(cu_num_rows, "cu_num_rows");
  int64_t* bounds = data_of<int64_t>(*drafts.bounds);
  for (int64_t sequence = 0; sequence <= batch; ++sequence) {
    bounds[sequence] = integer_at(row_bounds, sequence * row_bounds.stride) - sequence;
  }
  for (int64_t sequence = 0; sequence < batch; ++sequence) {
    // Bounds that are wrong are for `verify` to tell.
    const int64_t first = std::clamp<int64_t>(bounds[sequence], 0, total);
    const int64_t last = std::clamp<int64_t>(bounds[sequence + 1], 0, total);
    for (int64_t index = first; index < last; ++index) {
      data_of<int64_t>(drafts.token_ids)[index] = integer_at(tokens, (index + sequence + 1) * tokens.stride);
    }
    if (!position) continue;
    const int64_t row = std::clamp<int64_t>(bounds[sequence] + sequence, 0, std::max<int64_t>(rows - 1, 0));
    data_of<int64_t>(*drafts.position)[sequence] = rows > 0 ? integer_at(positions, row * positions.stride) : 0;
  }
  return drafts;
}

}  // namespace
}  // namespace specker
