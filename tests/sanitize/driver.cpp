// Random calls of the kernels without torch, for sanitizers: one after another, and by several threads at once.
//
//   driver CALLS SEED [threads]
//
// Every call runs on each build of the kernels that the processor supports; threads must give the same bytes.
#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>

#include "calls.h"
#include "dispatch.h"

namespace specker {
namespace {

constexpr int64_t THREADS = 3;

// Outputs of one call, full of a byte at first, so that an element left unwritten differs between two of them.
struct Outputs {
  std::vector<char> bytes[7];

  Outputs(const VerifyArguments& call, char garbage) {
    const int64_t scored = call.returns_accept_probs ? call.batch : 0;
    const int64_t sizes[] = {call.batch * (call.gamma + 1) * 8, call.batch * 8,        call.batch * 8, call.batch * 4,
                             call.batch * (call.gamma + 1) * 4, scored * call.gamma * 4, scored * 4};
    for (int output = 0; output < 7; ++output) bytes[output].assign(static_cast<size_t>(sizes[output]), garbage);
  }
  Outputs(const SampleArguments& call, char garbage) {
    const int64_t sizes[] = {call.batch * 8, call.batch * 4, call.batch * 8 * RECEIPT_FIELDS};
    for (int output = 0; output < 3; ++output) bytes[output].assign(static_cast<size_t>(sizes[output]), garbage);
  }

  template <class Element>
  Element* at(int output) {
    return bytes[output].empty() ? nullptr : reinterpret_cast<Element*>(bytes[output].data());
  }
};

void bind(VerifyArguments* call, Outputs* outputs) {
  call->token_ids = outputs->at<int64_t>(0);
  call->num_accepted = outputs->at<int64_t>(1);
  call->num_emitted = outputs->at<int64_t>(2);
  call->status = outputs->at<int32_t>(3);
  call->logprobs = outputs->at<float>(4);
  call->accept_probs = outputs->at<float>(5);
  call->expected_accepted = outputs->at<float>(6);
}

void bind(SampleArguments* call, Outputs* outputs) {
  call->token_ids = outputs->at<int64_t>(0);
  call->status = outputs->at<int32_t>(1);
  call->receipt = outputs->at<double>(2);
}

// Runs body(thread) on THREADS threads.
void on_threads(const std::function<void(int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < THREADS; ++thread) threads.emplace_back(body, thread);
  for (std::thread& thread : threads) thread.join();
}

void split(int64_t count, void (*body)(void*, int64_t, int64_t), void* context) {
  on_threads([=](int64_t part) {
    const int64_t begin = count * part / THREADS, end = count * (part + 1) / THREADS;
    if (begin < end) body(context, begin, end);
  });
}

template <class Arguments>
using Kernel = void (*)(const Arguments&, int64_t, Executor);

template <class Arguments>
void run_alone(const Arguments& call, Kernel<Arguments> kernel, Executor executor) {
  for (int64_t sequence = 0; sequence < call.batch; ++sequence) kernel(call, sequence, executor);
}

template <class Arguments>
Outputs outputs_of(Arguments call, char garbage, const std::function<void(const Arguments&)>& run) {
  Outputs outputs(call, garbage);
  bind(&call, &outputs);
  run(call);
  return outputs;
}

bool operator==(const Outputs& left, const Outputs& right) {
  for (int output = 0; output < 7; ++output) {
    if (left.bytes[output] != right.bytes[output]) return false;
  }
  return true;
}

// Threads share the sequences, then the shards of each row, then make the whole call all at once.
template <class Arguments>
bool threads_agree(const Arguments& call, Kernel<Arguments> kernel, const Outputs& expected) {
  const Outputs shared = outputs_of<Arguments>(call, 1, [&](const Arguments& bound) {
    std::atomic<int64_t> next{0};
    on_threads([&](int64_t) {
      for (int64_t sequence = next++; sequence < bound.batch; sequence = next++) kernel(bound, sequence, {nullptr});
    });
  });
  const Outputs sharded =
      outputs_of<Arguments>(call, 1, [&](const Arguments& bound) { run_alone(bound, kernel, {split}); });
  std::atomic<bool> same{shared == expected && sharded == expected};
  on_threads([&](int64_t) {
    const Outputs own =
        outputs_of<Arguments>(call, 1, [&](const Arguments& bound) { run_alone(bound, kernel, {nullptr}); });
    if (!(own == expected)) same = false;
  });
  return same;
}

template <class Arguments>
bool check_call(const Arguments& call, Kernel<Arguments> kernel, bool threaded) {
  const Outputs expected =
      outputs_of<Arguments>(call, 2, [&](const Arguments& bound) { run_alone(bound, kernel, {nullptr}); });
  return !threaded || threads_agree(call, kernel, expected);
}

std::vector<const Kernels*> builds() {
  std::vector<const Kernels*> found = {&default_kernels()};
#if defined(__x86_64__)
  if (supports_avx2()) found.push_back(&avx2_kernels());
  if (supports_avx512()) found.push_back(&avx512_kernels());
#endif
  return found;
}

int run(int64_t calls, uint64_t seed, bool threaded) {
  for (int64_t index = 0; index < calls; ++index) {
    Memory memory;
    CallMaker maker(seed + static_cast<uint64_t>(index), &memory);
    const VerifyArguments verify = maker.verify_call();
    const SampleArguments sample = maker.sample_call();
    for (const Kernels* kernels : builds()) {
      if (check_call(verify, kernels->verify, threaded) && check_call(sample, kernels->sample, threaded)) continue;
      std::fprintf(stderr, "driver: call of seed %lld: threads change the result of %s\n",
                   static_cast<long long>(seed) + index, kernels->name);
      return 1;
    }
  }
  std::printf("%lld calls of verify and of sample on", static_cast<long long>(calls));
  for (const Kernels* kernels : builds()) std::printf(" %s", kernels->name);
  std::printf("%s\n", threaded ? ", by several threads" : "");
  return 0;
}

}  // namespace
}  // namespace specker

int main(int count, char** arguments) {
  if (count < 3) return std::fprintf(stderr, "usage: driver CALLS SEED [threads]\n"), 2;
  const bool threaded = count > 3 && std::string(arguments[3]) == "threads";
  return specker::run(std::atoll(arguments[1]), std::strtoull(arguments[2], nullptr, 10), threaded);
}
