// Tests cancellation. A call may be cancelled long before it starts, just before it starts, or while it runs. It ends
// soon after the grace period. Then all elements of its outputs are NaN, and the bytes between the elements are
// unchanged. A call that ends within the grace period keeps its results.
#include <chrono>
#include <cstdio>
#include <optional>
#include <thread>

#include "cancellation.h"
#include "passes.h"

using namespace flashattn;
using namespace flashattn::driver;
using cpu::Cancellation;

namespace {

// An input of zeros, broadcast over the batch.
Tensor zeros(const Case& c, int heads, int rows, int columns) {
  Tensor tensor(broadcast_batch(c), heads, rows, columns, kRowMajor);
  std::fill(tensor.numbers.begin(), tensor.numbers.end(), 0);
  return tensor;
}
Inputs all_zeros(const Case& c) {
  Tensor query = zeros(c, c.heads(), c.query_len, c.head_dim), key = zeros(c, c.kv_heads, c.key_len, c.head_dim);
  Tensor value = zeros(c, c.kv_heads, c.key_len, c.value_dim), none = zeros(c, 1, 1, 1);
  return {query, key, value, none, none, none, none, none, none, none};
}

enum class Program { prefill, decode, backward };

// A call that the test cancels. Its outputs may have gaps between their elements.
struct Cancelled {
  Program program;
  Case c;
  Draw draw{std::mt19937(0)};
  CpuCall call;
  std::optional<GradientCall> gradient = {};

  static Case make_case(Program program, Dtype dtype, int batch, int query_len, int key_len) {
    Case c = {};
    c.decode = program == Program::decode;
    c.dtype = dtype;
    c.batch = {batch};
    c.kv_heads = c.group = 2;
    c.query_len = query_len, c.key_len = key_len;
    c.head_dim = 20, c.value_dim = 12;
    c.strided = true;
    return c;
  }
  Cancelled(Program program, Dtype dtype, int batch, int query_len, int key_len)
      : program(program), c(make_case(program, dtype, batch, query_len, key_len)), call(c, all_zeros(c), draw, true) {
    if (program != Program::backward) return;
    gradient.emplace(c, call, Cotangents{zeros(c, c.heads(), query_len, c.value_dim), zeros(c, 1, 1, 1), false});
  }

  void run(cpu::Cancellable cancellation) {
    call.args.cancellation = cancellation;
    if (gradient) gradient->args.forward.cancellation = cancellation;
    gradient ? gradient->run() : call.run();
  }
  std::vector<Result*> outputs() {
    if (gradient) return gradient->results();
    if (c.dtype == Dtype::float32) return {&call.out, &call.lse, &call.row_stats};
    return {&call.out, &call.exact_out, &call.lse, &call.row_stats};
  }
};

int failures = 0;

void expect(bool holds, const char* what, const Cancelled& call) {
  if (!holds) {
    std::printf("does not hold in pass %d, %s: %s\n", int(call.program), call.c.describe().c_str(), what);
    ++failures;
  }
}

int64_t nans(const Result& result) {
  std::vector<double> numbers = result.numbers();
  return std::count_if(numbers.begin(), numbers.end(), [](double x) { return std::isnan(x); });
}

void expect_nan(Cancelled& call) {
  for (const Result* output : call.outputs()) {
    expect(nans(*output) == int64_t(output->numbers().size()), "NaN in every element", call);
    expect(output->gaps_untouched(), "nothing written between the elements", call);
  }
}

void expect_result(Cancelled& call, const char* when) {
  for (const Result* output : call.outputs()) expect(nans(*output) == 0, when, call);
}

void wait_for_the_grace() {
  std::this_thread::sleep_for(std::chrono::duration<double>(Cancellation::kGraceSeconds));
}

void requested_long_ago(const Cancellation& cancellation, Program program, Dtype dtype) {
  Cancelled call(program, dtype, 3, 7, 1500);
  call.run({&cancellation, 0});
  expect_nan(call);
}

void requested_just_now(Program program, Dtype dtype) {
  Cancellation cancellation;
  Cancelled call(program, dtype, 1, 7, 40);
  cancellation.request();
  call.run({&cancellation, 0});
  expect_result(call, "the result, if it comes within the grace");
}

void waited_for_no_more(Program program, Dtype dtype) {
  Cancellation cancellation;
  Cancelled call(program, dtype, 1, 7, 40);
  cpu::Cancellable earlier = {&cancellation, cancellation.epoch()};
  cancellation.begin_epoch();
  cancellation.request();
  wait_for_the_grace();
  call.run(earlier);
  expect_result(call, "the result, if a later epoch is cancelled");
}

void requested_in_the_middle(Program program, Dtype dtype) {
  Cancellation cancellation;
  // Even on two threads, this call takes longer than the grace period. The backward pass reads arbitrary numbers as
  // out and lse, because no forward pass has run.
  bool decode = program == Program::decode;
  Cancelled call(program, dtype, decode ? 10'000 : 1, decode ? 8 : 150'000, decode ? 20'000 : 150'000);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (int i = 0; i < 20; ++i) {  // further requests must not restart the grace period
      cancellation.request();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });
  auto begin = std::chrono::steady_clock::now();
  call.run({&cancellation, 0});
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  other.join();
  expect(seconds.count() >= Cancellation::kGraceSeconds, "not before the grace is over", call);
  expect(seconds.count() < 20, "soon after it", call);  // takes 1 s on an idle machine without sanitizers
  expect_nan(call);
}

}  // namespace

int main() {
  Cancellation long_ago;
  long_ago.request();
  wait_for_the_grace();
  for (Program program : {Program::prefill, Program::decode, Program::backward}) {
    for (Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
      requested_long_ago(long_ago, program, dtype);
      requested_just_now(program, dtype);
    }
    waited_for_no_more(program, Dtype::float32);
    requested_in_the_middle(program, Dtype::float32);
  }
  return failures;
}
