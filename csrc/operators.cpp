// The operators' CPU implementations: unpacking, threads, registration. Only this file, tensors.h and operands.h know
// torch, and of torch only the stable ABI. Schemas and the checks of shapes are Python's (specker/operators.py).
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <tuple>

#include "contract.h"
#include "dispatch.h"
#include "operands.h"
#include "tensors.h"

namespace specker {
namespace {

// Below this many logits a second thread costs more than it saves.
constexpr int64_t SERIAL_SEQUENCES = 1 << 16;
// The same where threads have to meet after every row.
constexpr int64_t SERIAL_SHARDS = 1 << 17;

void run_in_parallel(int64_t count, void (*body)(void*, int64_t, int64_t), void* context) {
  torch::stable::parallel_for(0, count, 1, [=](int64_t begin, int64_t end) { body(context, begin, end); });
}

// Threads share the sequences where there are enough of them, else the shards of a row.
template <class Arguments>
void run(const Arguments& arguments, int64_t logits, void (*kernel)(const Arguments&, int64_t, Executor)) {
  int64_t threads = logits < SERIAL_SEQUENCES ? 1 : static_cast<int64_t>(torch::stable::get_num_threads());
  if (arguments.batch < threads && logits < SERIAL_SHARDS) threads = 1;
  if (threads == 1 || arguments.batch < threads) {
    const Executor executor = {threads == 1 ? nullptr : run_in_parallel};
    for (int64_t sequence = 0; sequence < arguments.batch; ++sequence) kernel(arguments, sequence, executor);
    return;
  }
  // Sequences differ in length and in where they stop: each thread takes the next that is free.
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t sequence = next++; sequence < arguments.batch; sequence = next++) {
        kernel(arguments, sequence, {nullptr});
      }
    }
  });
}

using Decided = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Verified = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Allocates what every round returns and tells the kernel where it is.
Decided decide_into(VerifyArguments& arguments, int64_t batch, int64_t gamma) {
  const int32_t int64 = aoti_torch_dtype_int64();
  const Decided outputs = {allocate({batch, gamma + 1}, int64), allocate({batch}, int64), allocate({batch}, int64),
                           allocate({batch}, aoti_torch_dtype_int32())};
  arguments.token_ids = data_of<int64_t>(std::get<0>(outputs));
  arguments.num_accepted = data_of<int64_t>(std::get<1>(outputs));
  arguments.num_emitted = data_of<int64_t>(std::get<2>(outputs));
  arguments.status = data_of<int32_t>(std::get<3>(outputs));
  arguments.batch = batch;
  arguments.gamma = gamma;
  return outputs;
}

Verified verify(const Tensor& draft_token_ids, const Tensor& target, const OptionalTensor& draft,
                const OptionalTensor& draft_receipt, const OptionalTensor& num_draft_tokens,
                const OptionalTensor& cu_num_draft_tokens, const OptionalTensor& draft_index,
                const Tensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
                const OptionalTensor& min_p, const Tensor& draft_temperature, const OptionalTensor& draft_top_k,
                const OptionalTensor& draft_top_p, const OptionalTensor& draft_min_p,
                const OptionalTensor& bias_offsets, const OptionalTensor& bias_token_ids,
                const OptionalTensor& bias_values, const OptionalTensor& allowed_tokens,
                const OptionalTensor& draft_bias_offsets, const OptionalTensor& draft_bias_token_ids,
                const OptionalTensor& draft_bias_values, const OptionalTensor& draft_allowed_tokens,
                const OptionalTensor& draft_columns, const OptionalTensor& draft_column_target_ids,
                const OptionalTensor& seed, const OptionalTensor& position, const OptionalTensor& uniforms,
                int64_t max_num_draft_tokens, bool target_is_probs, bool draft_is_probs, bool return_logprobs,
                bool return_accept_probs) {
  const bool flat = cu_num_draft_tokens.has_value();
  const int64_t batch = flat ? cu_num_draft_tokens->size(0) - 1 : draft_token_ids.size(0);
  const int64_t gamma = max_num_draft_tokens, scored = return_accept_probs ? batch : 0;
  const int32_t real = aoti_torch_dtype_float32();
  STD_TORCH_CHECK(uniforms || (seed && position), "seed and position: expected tensors where uniforms is None");
  VerifyArguments arguments = {};
  const Verified outputs = std::tuple_cat(
      decide_into(arguments, batch, gamma),
      std::make_tuple(return_logprobs ? allocate({batch, gamma + 1}, real) : allocate({0}, real),
                      return_accept_probs ? allocate({batch, gamma}, real) : allocate({0}, real),
                      allocate({scored}, real)));
  arguments.logprobs = data_of<float>(std::get<4>(outputs), return_logprobs);
  arguments.accept_probs = data_of<float>(std::get<5>(outputs), return_accept_probs);
  arguments.expected_accepted = data_of<float>(std::get<6>(outputs), return_accept_probs);
  arguments.returns_accept_probs = return_accept_probs;
  arguments.draft_token_ids = integers(draft_token_ids, "draft_token_ids");
  arguments.draft_token_ids.stride = draft_token_ids.stride(flat ? 0 : 1);
  arguments.draft_token_ids_stride_sequence = flat ? 0 : draft_token_ids.stride(0);
  arguments.target = rows(target, target_is_probs, "target");
  arguments.draft = rows(draft, draft_is_probs, "draft");
  arguments.has_draft = draft.has_value();
  arguments.receipt = doubles(draft_receipt, "draft_receipt");
  if (draft_receipt) {
    arguments.receipt_stride_sequence = flat ? 0 : draft_receipt->stride(0);
    arguments.receipt_stride_row = draft_receipt->stride(flat ? 0 : 1);
    arguments.receipt_stride_field = draft_receipt->stride(flat ? 1 : 2);
  }
  arguments.num_draft_tokens = integers(num_draft_tokens, "num_draft_tokens");
  arguments.cu_num_draft_tokens = integers(cu_num_draft_tokens, "cu_num_draft_tokens");
  arguments.draft_index = integers(draft_index, "draft_index");
  arguments.sampling = parameters(temperature, top_k, top_p, min_p);
  arguments.draft_sampling = parameters(draft_temperature, draft_top_k, draft_top_p, draft_min_p);
  arguments.adjustments = adjustments(bias_offsets, bias_token_ids, bias_values, allowed_tokens);
  arguments.draft_adjustments =
      adjustments(draft_bias_offsets, draft_bias_token_ids, draft_bias_values, draft_allowed_tokens);
  arguments.draft_columns = elements<int64_t>(draft_columns, ScalarType::Long, "draft_columns");
  arguments.draft_column_target_ids =
      elements<int64_t>(draft_column_target_ids, ScalarType::Long, "draft_column_target_ids");
  arguments.seed = integers(seed, "seed");
  arguments.position = integers(position, "position");
  arguments.uniforms = doubles(uniforms, "uniforms");
  if (uniforms) {
    arguments.uniforms_stride_sequence = flat ? 0 : uniforms->stride(0);
    arguments.uniforms_stride_row = uniforms->stride(flat ? 0 : 1);
    arguments.uniforms_stride_field = uniforms->stride(flat ? 1 : 2);
  }
  arguments.vocab = target.size(target.dim() - 1);
  arguments.draft_vocab = draft ? draft->size(draft->dim() - 1) : arguments.vocab;
  arguments.draft_slots = draft ? draft->size(0) : 0;
  arguments.total_draft_tokens = flat ? draft_token_ids.size(0) : 0;
  arguments.has_bonus_rows = !flat || target.size(0) != draft_token_ids.size(0);
  run(arguments, batch * (gamma + 1) * arguments.vocab, chosen_kernels().verify);
  return outputs;
}

Decided verify_plain(const Tensor& draft_token_ids, const Tensor& target, const OptionalTensor& draft,
                     const OptionalTensor& draft_receipt, const Tensor& temperature, const OptionalTensor& top_k,
                     const OptionalTensor& top_p, const OptionalTensor& min_p, const Tensor& seed,
                     const Tensor& position) {
  VerifyArguments arguments = {};
  const Decided outputs = decide_into(arguments, target.size(0), target.size(1) - 1);
  arguments.draft_token_ids = integers(draft_token_ids, "draft_token_ids");
  arguments.draft_token_ids.stride = draft_token_ids.stride(1);
  arguments.draft_token_ids_stride_sequence = draft_token_ids.stride(0);
  arguments.target = rows(target, false, "target");
  arguments.vocab = arguments.draft_vocab = target.size(2);
  arguments.has_bonus_rows = true;
  if (draft) {
    arguments.has_draft = true;
    arguments.draft = rows(draft, false, "draft");
  }
  if (draft_receipt) {
    arguments.receipt = doubles(draft_receipt, "draft_receipt");
    arguments.receipt_stride_sequence = draft_receipt->stride(0);
    arguments.receipt_stride_row = draft_receipt->stride(1);
    arguments.receipt_stride_field = draft_receipt->stride(2);
  }
  arguments.sampling = arguments.draft_sampling = parameters(temperature, top_k, top_p, min_p);
  arguments.seed = integers(seed, "seed");
  arguments.position = integers(position, "position");
  run(arguments, arguments.batch * (arguments.gamma + 1) * arguments.vocab, chosen_kernels().verify);
  return outputs;
}

std::tuple<Tensor, Tensor, Tensor> sample(const Tensor& logits, const Tensor& temperature, const OptionalTensor& top_k,
                                          const OptionalTensor& top_p, const OptionalTensor& min_p,
                                          const OptionalTensor& bias_offsets, const OptionalTensor& bias_token_ids,
                                          const OptionalTensor& bias_values, const OptionalTensor& allowed_tokens,
                                          const Tensor& seed, const Tensor& position) {
  const int64_t batch = logits.size(0);
  const std::tuple<Tensor, Tensor, Tensor> outputs = {
      allocate({batch}, aoti_torch_dtype_int64()),
      allocate({batch}, aoti_torch_dtype_int32()),
      allocate({batch, RECEIPT_FIELDS}, aoti_torch_dtype_float64()),
  };
  SampleArguments arguments = {};
  arguments.token_ids = data_of<int64_t>(std::get<0>(outputs));
  arguments.status = data_of<int32_t>(std::get<1>(outputs));
  arguments.receipt = data_of<double>(std::get<2>(outputs));
  arguments.logits = rows(logits, false, "logits");
  // Row `sequence` of a matrix: its only stride is that of the sequence.
  arguments.logits.stride_sequence = logits.stride(0);
  arguments.sampling = parameters(temperature, top_k, top_p, min_p);
  arguments.adjustments = adjustments(bias_offsets, bias_token_ids, bias_values, allowed_tokens);
  arguments.seed = integers(seed, "seed");
  arguments.position = integers(position, "position");
  arguments.batch = batch;
  arguments.vocab = logits.size(1);
  run(arguments, batch * arguments.vocab, chosen_kernels().sample);
  return outputs;
}

Tensor verify_into(const Tensor& draft_token_ids, const Tensor& target, const OptionalTensor& draft,
                   const OptionalTensor& next_tokens, const OptionalTensor& next_siblings,
                   const OptionalTensor& cu_num_draft_tokens, const OptionalTensor& cu_num_rows,
                   const OptionalTensor& slots, const OptionalTensor& temperature,
                   const OptionalTensor& seed, const OptionalTensor& position, const OptionalTensor& accept_uniforms,
                   const OptionalTensor& emission_uniforms, int64_t max_num_draft_tokens, bool target_is_probs,
                   bool draft_is_probs, const OptionalTensor& bonus_token_ids, const OptionalTensor& places,
                   int64_t padding, const Tensor& output_token_ids, const OptionalTensor& output_places,
                   const OptionalTensor& passed_total, const OptionalTensor& accepted_total,
                   const OptionalTensor& emitted_total, const OptionalTensor& status_total) {
  STD_TORCH_CHECK(!passed_total || (seed && position), "passed_total: expected seed and position with it");
  STD_TORCH_CHECK(!slots || temperature, "slots: expected temperature with it");
  Drafts drafts = {draft_token_ids, cu_num_draft_tokens, position};
  if (cu_num_rows) drafts = without_roots(draft_token_ids, *cu_num_rows, position);
  const int64_t batch = drafts.bounds ? drafts.bounds->size(0) - 1 : draft_token_ids.size(0);
  const OptionalTensor none;
  OptionalTensor uniforms, num_draft_tokens;
  if (next_tokens || next_siblings) num_draft_tokens = chain_lengths(next_tokens, next_siblings);
  if (accept_uniforms && emission_uniforms) {
    uniforms = paired_uniforms(*accept_uniforms, *emission_uniforms, batch, max_num_draft_tokens);
  }
  const Laws laws = engine_laws(temperature, seed, slots, batch, draft_is_probs);
  const Verified verified =
      verify(drafts.token_ids, target, draft, none, num_draft_tokens, drafts.bounds, draft ? slots : none,
             laws.temperature, none, none, none, laws.draft_temperature, none, none, none, none, none, none, none, none,
             none, none, none, none, none, laws.seed, drafts.position, uniforms, max_num_draft_tokens, target_is_probs,
             draft_is_probs, false, passed_total.has_value());
  DeliverArguments arguments = {};
  arguments.output_token_ids = cells(output_token_ids, "output_token_ids");
  arguments.output_places = cells(output_places, "output_places");
  arguments.passed_total = cells(passed_total, "passed_total");
  arguments.accepted_total = cells(accepted_total, "accepted_total");
  arguments.emitted_total = cells(emitted_total, "emitted_total");
  arguments.status_total = cells(status_total, "status_total");
  arguments.token_ids = data_of<const int64_t>(std::get<0>(verified));
  arguments.num_accepted = data_of<const int64_t>(std::get<1>(verified));
  arguments.num_emitted = data_of<const int64_t>(std::get<2>(verified));
  arguments.status = data_of<const int32_t>(std::get<3>(verified));
  arguments.accept_probs = data_of<const float>(std::get<5>(verified));
  arguments.seed = cells(laws.seed, "seed");
  arguments.position = cells(drafts.position, "position");
  arguments.bonus_token_ids = cells(bonus_token_ids, "bonus_token_ids");
  arguments.places = cells(places, "places");
  arguments.padding = padding;
  arguments.gamma = max_num_draft_tokens;
  arguments.columns = places && output_places ? output_places->size(1) : 0;
  arguments.output_size = output_token_ids.size(0);
  for (int64_t sequence = 0; sequence < batch; ++sequence) deliver_sequence(arguments, sequence);
  return std::get<3>(verified);
}

}  // namespace
}  // namespace specker

STABLE_TORCH_LIBRARY_IMPL(specker, CPU, library) {
  library.impl("verify", TORCH_BOX(&specker::verify));
  library.impl("verify_plain", TORCH_BOX(&specker::verify_plain));
  library.impl("sample", TORCH_BOX(&specker::sample));
  library.impl("verify_into", TORCH_BOX(&specker::verify_into));
}

// For tests, by ctypes: the build in use, and the exponential of any build.
extern "C" const char* specker_cpu_capability() { return specker::chosen_kernels().name; }

extern "C" void specker_weigh(const char* capability, const float* differences, float* weights, int64_t count,
                              double temperature) {
  specker::kernels_of(capability).weigh(differences, weights, count, temperature);
}
