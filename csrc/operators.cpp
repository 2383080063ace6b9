// The operators' CPU implementations: unpacking, threads, registration. The only file that includes torch, and of torch
// only the stable ABI. Schemas, and the checks of shapes and devices, are Python's (specker/operators.py).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <optional>
#include <tuple>

#include "contract.h"
#include "dispatch.h"

namespace specker {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Below this many logits a second thread costs more than it saves.
constexpr int64_t SERIAL_WORK = 1 << 16;

Tensor allocate(std::initializer_list<int64_t> sizes, int32_t dtype) {
  int64_t strides[2] = {1, 1};
  if (sizes.size() == 2) strides[0] = std::max<int64_t>(sizes.begin()[1], 1);
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides,
                                                         dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

template <class Element>
Element* data_of(const Tensor& tensor, bool wanted = true) {
  return wanted ? static_cast<Element*>(tensor.mutable_data_ptr()) : nullptr;
}

int64_t broadcast_stride(const Tensor& tensor) { return tensor.numel() == 1 ? 0 : tensor.stride(0); }

Integers integers(const OptionalTensor& tensor, const char* name) {
  if (!tensor) return {nullptr, false, 0};
  const ScalarType dtype = tensor->scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Long || dtype == ScalarType::Int, name, ": expected dtype int64 or int32");
  return {tensor->const_data_ptr(), dtype == ScalarType::Long, broadcast_stride(*tensor)};
}

Reals reals(const OptionalTensor& tensor, const char* name) {
  if (!tensor) return {nullptr, false, 0};
  const ScalarType dtype = tensor->scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Double || dtype == ScalarType::Float, name,
                  ": expected dtype float64 or float32");
  return {tensor->const_data_ptr(), dtype == ScalarType::Double, broadcast_stride(*tensor)};
}

DType logits_dtype(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::FLOAT32;
    case ScalarType::BFloat16:
      return DType::BFLOAT16;
    case ScalarType::Half:
      return DType::FLOAT16;
    default:
      STD_TORCH_CHECK(false, name, ": expected dtype float32, bfloat16 or float16");
      return DType::FLOAT32;
  }
}

Rows rows(const OptionalTensor& tensor, bool is_probs, const char* name) {
  if (!tensor) return {nullptr, DType::FLOAT32, is_probs, 0, 0};
  const int64_t rank = tensor->dim();
  STD_TORCH_CHECK(tensor->size(rank - 1) <= 1 || tensor->stride(rank - 1) == 1, name,
                  ": expected a contiguous last axis");
  return {tensor->const_data_ptr(), logits_dtype(*tensor, name), is_probs, rank == 3 ? tensor->stride(0) : 0,
          tensor->stride(rank - 2)};
}

SamplingParameters parameters(const Tensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
                              const OptionalTensor& min_p) {
  return {reals(temperature, "temperature"), integers(top_k, "top_k"), reals(top_p, "top_p"), reals(min_p, "min_p")};
}

template <class Element>
const Element* elements(const OptionalTensor& tensor, ScalarType dtype, const char* name) {
  if (!tensor) return nullptr;
  STD_TORCH_CHECK(tensor->scalar_type() == dtype, name, ": unexpected dtype");
  const int64_t last = tensor->dim() - 1;
  STD_TORCH_CHECK(tensor->size(last) <= 1 || tensor->stride(last) == 1, name, ": expected a contiguous last axis");
  return static_cast<const Element*>(tensor->const_data_ptr());
}

Adjustments adjustments(const OptionalTensor& bias_offsets, const OptionalTensor& bias_token_ids,
                        const OptionalTensor& bias_values, const OptionalTensor& allowed_tokens) {
  return {elements<int64_t>(bias_offsets, ScalarType::Long, "bias_offsets"),
          elements<int64_t>(bias_token_ids, ScalarType::Long, "bias_token_ids"),
          elements<float>(bias_values, ScalarType::Float, "bias_values"),
          elements<int32_t>(allowed_tokens, ScalarType::Int, "allowed_tokens"),
          allowed_tokens ? allowed_tokens->stride(0) : 0,
          allowed_tokens ? allowed_tokens->stride(1) : 0};
}

const double* doubles(const OptionalTensor& tensor, const char* name) {
  if (!tensor) return nullptr;
  STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Double, name, ": expected dtype float64");
  return static_cast<const double*>(tensor->const_data_ptr());
}

void run_in_parallel(int64_t count, void (*body)(void*, int64_t, int64_t), void* context) {
  torch::stable::parallel_for(0, count, 1, [=](int64_t begin, int64_t end) { body(context, begin, end); });
}

// Threads share the sequences where there are enough of them, else the shards of a row.
template <class Arguments>
void run(const Arguments& arguments, int64_t logits, void (*kernel)(const Arguments&, int64_t, Executor)) {
  const int64_t threads = logits < SERIAL_WORK ? 1 : static_cast<int64_t>(torch::stable::get_num_threads());
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

using Verified = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

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
                int64_t max_num_draft_tokens, bool target_is_probs, bool draft_is_probs, bool return_logprobs, bool return_accept_probs) {
  const bool flat = cu_num_draft_tokens.has_value();
  const int64_t batch = flat ? cu_num_draft_tokens->size(0) - 1 : draft_token_ids.size(0);
  const int64_t gamma = max_num_draft_tokens, scored = return_accept_probs ? batch : 0;
  const int32_t int64 = aoti_torch_dtype_int64(), int32 = aoti_torch_dtype_int32(), real = aoti_torch_dtype_float32();
  const Verified outputs = {
      allocate({batch, gamma + 1}, int64),
      allocate({batch}, int64),
      allocate({batch}, int64),
      allocate({batch}, int32),
      return_logprobs ? allocate({batch, gamma + 1}, real) : allocate({0}, real),
      return_accept_probs ? allocate({batch, gamma}, real) : allocate({0}, real),
      allocate({scored}, real),
  };
  STD_TORCH_CHECK(uniforms || (seed && position), "seed and position: expected tensors where uniforms is None");

  VerifyArguments arguments = {};
  arguments.token_ids = data_of<int64_t>(std::get<0>(outputs));
  arguments.num_accepted = data_of<int64_t>(std::get<1>(outputs));
  arguments.num_emitted = data_of<int64_t>(std::get<2>(outputs));
  arguments.status = data_of<int32_t>(std::get<3>(outputs));
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
  arguments.batch = batch;
  arguments.gamma = gamma;
  arguments.vocab = target.size(target.dim() - 1);
  arguments.draft_vocab = draft ? draft->size(draft->dim() - 1) : arguments.vocab;
  arguments.draft_slots = draft ? draft->size(0) : 0;
  arguments.total_draft_tokens = flat ? draft_token_ids.size(0) : 0;
  arguments.has_bonus_rows = !flat || target.size(0) != draft_token_ids.size(0);
  run(arguments, batch * (gamma + 1) * arguments.vocab, chosen_kernels().verify);
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

}  // namespace
}  // namespace specker

STABLE_TORCH_LIBRARY_IMPL(specker, CPU, library) {
  library.impl("verify", TORCH_BOX(&specker::verify));
  library.impl("sample", TORCH_BOX(&specker::sample));
}

// For tests, by ctypes: the build in use, and the exponential of any build.
extern "C" const char* specker_cpu_capability() { return specker::chosen_kernels().name; }

extern "C" void specker_weigh(const char* capability, const float* differences, float* weights, int64_t count,
                              double temperature) {
  specker::kernels_of(capability).weigh(differences, weights, count, temperature);
}
