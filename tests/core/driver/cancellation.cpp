// What becomes of cancelled calls: NaN in every element of every output and nothing beside them, soon, whether the
// request came long ago or comes from another thread in the middle; calls that end within the grace are not touched.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "backward.h"
#include "cancellation.h"

using namespace flashattn;
using namespace flashattn::cpu;

namespace {

constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 20, kValueDim = 12;
constexpr uint8_t kUntouched = 0x55;  // is no NaN in any dtype

// An array (batch, heads, rows, columns) of float32 or bfloat16.
struct Array {
  Dtype dtype;
  int64_t rows;  // of all heads
  int columns, gap;
  std::vector<uint8_t> bytes;

  Array(Dtype dtype, int64_t rows, int columns, uint8_t byte, int gap = 0)
      : dtype(dtype), rows(rows), columns(columns), gap(gap), bytes(size_t(rows * (columns + gap)) * size(), byte) {}

  size_t size() const { return dtype == Dtype::float32 ? 4 : 2; }
  Strides strides(int64_t heads) const {
    Strides strides = {};
    strides.row = columns + gap;
    strides.column = 1;
    strides.head = rows / heads * strides.row;
    return strides;
  }
  // How many elements are NaN, and whether nothing was written between the rows.
  int64_t nans() const {
    int64_t count = 0;
    for (int64_t i = 0; i < rows * (columns + gap); ++i) {
      uint32_t bits = 0;  // bfloat16 is the upper half of a float32
      std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 4 - size(), bytes.data() + size_t(i) * size(), size());
      count += (bits & 0x7fffffff) > 0x7f800000;
    }
    return count;
  }
  bool gaps_untouched() const {
    for (int64_t i = 0; i < rows * (columns + gap); ++i) {
      for (size_t byte = 0; i % (columns + gap) >= columns && byte < size(); ++byte) {
        if (bytes[size_t(i) * size() + byte] != kUntouched) return false;
      }
    }
    return true;
  }
};

enum class Program { prefill, decode, backward };

struct Call {
  Program pass;
  int64_t with_gradients;  // batch elements
  Array query, key, value, out, lse, row_stats, out_gradient, query_gradient, key_gradient, value_gradient, delta;
  BackwardArgs args = {};

  // Every head has queries and keys of its own, all 0; batch elements, as many as wanted, share everything.
  Call(Program pass, Dtype dtype, int64_t batch, int query_len, int key_len)
      : pass(pass),
        with_gradients(pass == Program::backward ? batch : 0),
        query(dtype, kHeads * query_len, kHeadDim, 0),
        key(dtype, kKvHeads * key_len, kHeadDim, 0),
        value(dtype, kKvHeads * key_len, kValueDim, 0),
        out(dtype, batch * kHeads * query_len, kValueDim, kUntouched, 3),
        lse(Dtype::float32, batch * kHeads * query_len, 1, kUntouched, 1),
        row_stats(Dtype::float32, batch * kHeads * query_len, 2, kUntouched, 1),
        out_gradient(dtype, kHeads * query_len, kValueDim, 0),
        query_gradient(dtype, with_gradients * kHeads * query_len, kHeadDim, kUntouched),
        key_gradient(dtype, with_gradients * kKvHeads * key_len, kHeadDim, kUntouched),
        value_gradient(dtype, with_gradients * kKvHeads * key_len, kValueDim, kUntouched),
        delta(Dtype::float32, with_gradients * kHeads * query_len, 1, kUntouched) {
    AttentionArgs& forward = args.forward;
    AttentionParams& p = forward.params;
    p.batch_dims = 1;
    p.batch_shape[0] = int(batch);
    p.batch_size = batch;
    p.num_heads = kHeads;
    p.num_kv_heads = kKvHeads;
    p.query_len = query_len;
    p.key_len = key_len;
    p.head_dim = kHeadDim;
    p.value_dim = kValueDim;
    p.scale = 1;
    p.query = query.strides(kHeads);
    p.key = key.strides(kKvHeads);
    p.value = value.strides(kKvHeads);
    p.out = out.strides(batch * kHeads);
    p.lse = lse.strides(batch * kHeads);
    p.row_stats = row_stats.strides(batch * kHeads);
    p.out.batch[0] = kHeads * p.out.head;
    p.lse.batch[0] = kHeads * p.lse.head;
    p.row_stats.batch[0] = kHeads * p.row_stats.head;
    forward.dtype = dtype;
    forward.query = query.bytes.data();
    forward.key = key.bytes.data();
    forward.value = value.bytes.data();
    forward.out = out.bytes.data();
    forward.lse = reinterpret_cast<float*>(lse.bytes.data());
    forward.row_stats = reinterpret_cast<float*>(row_stats.bytes.data());
    args.out_gradient = out_gradient.bytes.data();
    args.out_gradient_strides = out_gradient.strides(kHeads);
    args.query_gradient = query_gradient.bytes.data();
    args.key_gradient = key_gradient.bytes.data();
    args.value_gradient = value_gradient.bytes.data();
    args.delta = reinterpret_cast<float*>(delta.bytes.data());
  }

  void run() {
    switch (pass) {
      case Program::prefill: return prefill(args.forward);
      case Program::decode: return decode(args.forward);
      case Program::backward: return backward(args);
    }
  }
  std::vector<const Array*> outputs() const {
    if (pass == Program::backward) return {&query_gradient, &key_gradient, &value_gradient, &delta};
    return {&out, &lse, &row_stats};
  }
};

int failures = 0;

void expect(bool holds, const char* what, Program pass, Dtype dtype) {
  if (!holds) {
    std::printf("does not hold in pass %d, dtype %d: %s\n", int(pass), int(dtype), what);
    ++failures;
  }
}

void expect_nan(const Call& call, Dtype dtype) {
  for (const Array* output : call.outputs()) {
    expect(output->nans() == output->rows * output->columns, "NaN in every element", call.pass, dtype);
    expect(output->gaps_untouched(), "nothing written between the rows", call.pass, dtype);
  }
}

void requested_long_ago(const Cancellation& cancellation, Program pass, Dtype dtype) {
  Call call(pass, dtype, 3, 7, 1500);
  call.args.forward.cancellation = {&cancellation, 0};
  call.run();
  expect_nan(call, dtype);
}

void requested_just_now(Program pass, Dtype dtype) {
  Cancellation cancellation;
  Call call(pass, dtype, 1, 7, 40);
  call.args.forward.cancellation = {&cancellation, 0};
  cancellation.request();
  call.run();
  for (const Array* output : call.outputs()) {
    expect(output->nans() == 0, "the result, if it comes within the grace", pass, dtype);
  }
}

void waited_for_no_more(Program pass, Dtype dtype) {
  Cancellation cancellation;
  Call call(pass, dtype, 1, 7, 40);
  call.args.forward.cancellation = {&cancellation, cancellation.epoch()};
  cancellation.begin_epoch();
  cancellation.request();
  std::this_thread::sleep_for(std::chrono::duration<double>(Cancellation::kGraceSeconds));
  call.run();
  for (const Array* output : call.outputs()) {
    expect(output->nans() == 0, "the result, if a later epoch is cancelled", pass, dtype);
  }
}

void requested_in_the_middle(Program pass, Dtype dtype) {
  Cancellation cancellation;
  // Long work for two threads. What the gradient reads need not be right.
  Call call = pass == Program::decode ? Call(pass, dtype, 10'000, 8, 20'000) : Call(pass, dtype, 1, 150'000, 150'000);
  call.args.forward.cancellation = {&cancellation, 0};
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (int i = 0; i < 20; ++i) {  // further requests put nothing off
      cancellation.request();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });
  auto begin = std::chrono::steady_clock::now();
  call.run();
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  other.join();
  expect(seconds.count() >= Cancellation::kGraceSeconds, "not before the grace is over", pass, dtype);
  expect(seconds.count() < 20, "soon after it", pass, dtype);  // where nothing else runs and no sanitizer: 1 s
  expect_nan(call, dtype);
}

}  // namespace

int main() {
  Cancellation long_ago;
  long_ago.request();
  std::this_thread::sleep_for(std::chrono::duration<double>(Cancellation::kGraceSeconds));
  for (Program pass : {Program::prefill, Program::decode, Program::backward}) {
    for (Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
      requested_long_ago(long_ago, pass, dtype);
      requested_just_now(pass, dtype);
    }
    waited_for_no_more(pass, Dtype::float32);
    requested_in_the_middle(pass, Dtype::float32);
  }
  return failures;
}
