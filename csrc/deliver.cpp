// Writes a round into tensors of another engine's: a few numbers a position.
#include <algorithm>
#include <cstdint>

#include "contract.h"

namespace specker {
namespace {

#include "philox.h"

constexpr int32_t UNHEALTHY = TARGET_INVALID | INVALID_TEMPERATURE | INVALID_TOP_P | INVALID_MIN_P |
                              INVALID_NUM_DRAFT_TOKENS | INVALID_UNIFORMS | INVALID_DRAFT_INDEX;

void store(const Cells& cells, int64_t value, int64_t sequence, int64_t index = 0) {
  const int64_t offset = sequence * cells.stride_sequence + index * cells.stride_index;
  if (cells.is_int64) {
    static_cast<int64_t*>(cells.data)[offset] = value;
  } else {
    static_cast<int32_t*>(cells.data)[offset] = static_cast<int32_t>(value);
  }
}

// The token of a position, or what stands behind the last one.
int64_t token_at(const DeliverArguments& arguments, int64_t sequence, int64_t index) {
  const int64_t last = arguments.num_accepted[sequence];
  if (index > last) return arguments.padding;
  const bool missing = arguments.bonus_token_ids.data && index == last && arguments.num_emitted[sequence] == last &&
                       !(arguments.status[sequence] & UNHEALTHY);
  if (missing) return cell_at(arguments.bonus_token_ids, sequence);
  return arguments.token_ids[sequence * (arguments.gamma + 1) + index];
}

// Draft tokens that pass their own test, also behind the first rejection.
int64_t count_passed(const DeliverArguments& arguments, int64_t sequence) {
  const uint64_t seed = static_cast<uint64_t>(cell_at(arguments.seed, sequence));
  const uint64_t position = static_cast<uint64_t>(cell_at(arguments.position, sequence));
  int64_t passed = 0;
  for (int64_t index = 0; index < arguments.gamma; ++index) {
    const float chance = arguments.accept_probs[sequence * arguments.gamma + index];
    passed += philox_uniforms(seed, position + static_cast<uint64_t>(index), VERIFY_PURPOSE).accept < chance;
  }
  // Accept probabilities are float32: rounding must not take back a token that was kept.
  return std::max(passed, arguments.num_accepted[sequence]);
}

void add(const Cells& totals, int64_t count, int64_t sequence) {
  if (totals.data) store(totals, cell_at(totals, sequence) + count, sequence);
}

}  // namespace

void deliver_sequence(const DeliverArguments& arguments, int64_t sequence) {
  const int64_t last = arguments.num_accepted[sequence], width = arguments.gamma + 1;
  for (int64_t index = 0; index < width; ++index) {
    const int64_t token = token_at(arguments, sequence, index);
    if (!arguments.places.data) {
      store(arguments.output_token_ids, token, sequence, index);
      continue;
    }
    const int64_t place = cell_at(arguments.places, sequence, index);
    if (place >= 0 && place < arguments.output_size) store(arguments.output_token_ids, token, 0, place);
    if (index < arguments.columns) store(arguments.output_places, index > last ? -1 : place, sequence, index);
  }
  for (int64_t index = width; index < arguments.columns; ++index) store(arguments.output_places, -1, sequence, index);
  if (arguments.passed_total.data) add(arguments.passed_total, count_passed(arguments, sequence), sequence);
  add(arguments.accepted_total, last, sequence);
  add(arguments.emitted_total, arguments.num_emitted[sequence], sequence);
  if (!arguments.status_total.data) return;
  store(arguments.status_total, cell_at(arguments.status_total, sequence) | arguments.status[sequence], sequence);
}

}  // namespace specker
