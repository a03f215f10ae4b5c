// Breaks the contract of contract.h in one place at a time. check() must refuse each such call with a message that
// names the field, and must accept the nearest legal values. Prints the expectations that fail.
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "passes.h"

using namespace flashattn;
using namespace flashattn::driver;

namespace {

int failures = 0, expectations = 0;

// A legal call with every option. It runs once, to show that legal calls really run.
struct Legal {
  Case c;
  Inputs in;
  CpuCall call;

  static Case make_case(bool quantised) {
    Case c = {};
    c.dtype = c.group_dtype = Dtype::float16;
    c.batch = {2, 3};
    c.kv_heads = 2, c.group = 2;
    c.query_len = 5, c.key_len = 7;
    c.head_dim = 32, c.value_dim = 64;
    c.causal = c.key_range = c.visible = c.bias = c.sinks = c.alibi = true;
    c.softcap = 3, c.window = 4, c.tree_size = 3, c.query_size = 1;
    if (quantised) c.bits = 4, c.group_size = 32;
    return c;
  }
  Legal(bool quantised, Draw& draw) : c(make_case(quantised)), in(draw_inputs(c, draw)), call(c, in, draw, !quantised) {
    call.run();
  }
};

// `part`: text that the error message must contain, or null if the call must be accepted.
template <typename Args, typename Change>
void expect(const Args& legal, const char* what, const char* part, Change change) {
  Args args = legal;
  change(args);
  ++expectations;
  std::string message;
  try {
    cpu::check(args);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  bool holds =
      part ? message.find("[flash_attention] ") == 0 && message.find(part) != std::string::npos : message.empty();
  if (!holds) {
    std::printf("%s: '%s', expected %s\n", what, message.c_str(), part ? part : "no refusal");
    ++failures;
  }
}

// `change` is applied to legal arguments. Its source text names the check in the output.
#define REFUSED(part, change) expect(legal, #change, part, [&](auto& a) { change; })
#define ACCEPTED(change) expect(legal, #change, nullptr, [&](auto& a) { change; })

void sizes(const cpu::AttentionArgs& legal) {
  ACCEPTED((void)a);
  REFUSED("batch_dims is 9, expected 0 to 8", a.params.batch_dims = 9);
  REFUSED("batch_dims is -1", a.params.batch_dims = -1);
  REFUSED("a size in batch_shape is -2", a.params.batch_shape[0] = -2; a.params.batch_size = -6);
  REFUSED("batch_size is 5, expected the product of batch_shape, 6", a.params.batch_size = 5);
  REFUSED("the product of batch_shape is", a.params.batch_shape[0] = a.params.batch_shape[1] = 2147483647);
  ACCEPTED(a.params.batch_shape[0] = 0; a.params.batch_size = 0; a.query = nullptr; a.out = nullptr; a.tree = nullptr);
  REFUSED("num_kv_heads is 0, expected 1 to", a.params.num_kv_heads = 0);
  REFUSED("num_heads is 3, expected a multiple of num_kv_heads, 2", a.params.num_heads = 3);
  REFUSED("num_heads is -2", a.params.num_heads = -2);
  ACCEPTED(a.params.num_heads = 2);
  ACCEPTED(a.params.num_heads = 0);
  REFUSED("query_len is -1", a.params.query_len = -1);
  ACCEPTED(a.params.query_len = 0);
  REFUSED("key_len is -1", a.params.key_len = -1);
  ACCEPTED(a.params.key_len = 0; a.params.tree_size = 0);
  REFUSED("query_len + key_len is 2147482624, expected 0 to 2147482623", a.params.key_len = 2147482619);
  REFUSED("head_dim is 0, expected 1 to 512", a.params.head_dim = 0);
  REFUSED("head_dim is 513, expected 1 to 512", a.params.head_dim = 513);
  ACCEPTED(a.params.head_dim = 31);
  REFUSED("value_dim is 0, expected 1 to 512", a.params.value_dim = 0);
  REFUSED("value_dim is 513, expected 1 to 512", a.params.value_dim = 513);
}

void options(const cpu::AttentionArgs& legal) {
  REFUSED("scale is nan", a.params.scale = NAN);
  REFUSED("scale is inf", a.params.scale = INFINITY);
  ACCEPTED(a.params.scale = -1e30f);
  REFUSED("softcap is -1", a.params.softcap = -1);
  REFUSED("softcap is nan", a.params.softcap = NAN);
  REFUSED("softcap is inf", a.params.softcap = INFINITY);
  REFUSED("softcap is 2e-38", a.params.softcap = 2e-38f; a.params.scale = 10);
  ACCEPTED(a.params.softcap = 2e-38f; a.params.scale = 1);
  REFUSED("window is -1, expected at least 1", a.params.window = -1);
  ACCEPTED(a.params.window = 2147483647);
  REFUSED("tree_size is 8, expected 0 to 7", a.params.tree_size = 8);
  REFUSED("tree_size is -1", a.params.tree_size = -1);
  REFUSED("tree is null, expected bits of 3 keys", a.tree = nullptr);
  ACCEPTED(a.tree = nullptr; a.params.tree_size = 0);
  REFUSED("dtype is 3", a.dtype = static_cast<Dtype>(3));
  REFUSED("bias_dtype is 200", a.bias_dtype = static_cast<Dtype>(200));
  ACCEPTED(a.bias_dtype = static_cast<Dtype>(200); a.bias = nullptr);
}

void pointers(const cpu::AttentionArgs& legal) {
  REFUSED("query is null", a.query = nullptr);
  REFUSED("key is null", a.key = nullptr);
  ACCEPTED(a.key = a.value = nullptr; a.params.key_len = 0; a.params.tree_size = 0);
  REFUSED("value is null", a.value = nullptr);
  REFUSED("out is null", a.out = nullptr);
  REFUSED("lse is null", a.lse = nullptr);
  REFUSED("row_stats is null", a.row_stats = nullptr);
  ACCEPTED(a.visible = nullptr; a.bias = nullptr; a.key_start = a.key_stop = nullptr;
           a.sinks = a.alibi_slopes = nullptr);
  REFUSED("query is at address", a.query = static_cast<const char*>(a.query) + 1);
  ACCEPTED(a.query = static_cast<const char*>(a.query) + 2);
  REFUSED("sinks is at address", a.sinks = reinterpret_cast<const float*>(reinterpret_cast<const char*>(a.sinks) + 2));
  REFUSED("out shares memory with query", a.out = const_cast<void*>(a.query));
  REFUSED("out shares memory with bias", a.bias = a.out);
  REFUSED("exact_out shares memory with", a.exact_out = static_cast<float*>(a.out));
  REFUSED("exact_out is at address", a.exact_out = reinterpret_cast<float*>(reinterpret_cast<char*>(a.exact_out) + 2));
  ACCEPTED(a.exact_out = nullptr);
  REFUSED("lse shares memory with out", a.lse = static_cast<float*>(a.out) + 10);
  ACCEPTED(a.key = a.query);
}

void strides(const cpu::AttentionArgs& legal) {
  constexpr int64_t kHuge = int64_t{1} << 62;
  REFUSED("query has strides that reach over 9223372036854775807", a.params.query.row = kHuge);
  REFUSED("key has strides that reach over", a.params.key.batch[0] = -kHuge);
  REFUSED("bias has strides that reach over", a.params.bias.column = int64_t{1} << 46);
  REFUSED("beyond the first or the last address", a.params.key.row = -(int64_t{1} << 45));
  ACCEPTED(a.params.query.row = 0);
  ACCEPTED(a.query = static_cast<const char*>(a.query) + 4 * 32 * 2; a.params.query.row = -32);
  ACCEPTED(a.params.bias.head = a.params.visible.row = a.params.sinks.head = 0);
  REFUSED("query has stride 32 in a dimension of size 1, expected 0", a.params.query_len = 1; a.params.tree_size = 1;
          a.params.tree = a.params.lse = a.params.row_stats = {}; a.params.query.row = 32);
  REFUSED("out has stride 0", a.params.out.row = 0);
  REFUSED("out has stride 63 where smaller strides reach over 63 elements", a.params.out.row = 63);
  REFUSED("out has stride 63", a.params.out.row = -63);
  ACCEPTED(a.params.value_dim = 63; a.params.out.row = 63);
  REFUSED("lse has stride 0", a.params.lse.batch[1] = 0);
  REFUSED("row_stats has stride 0", a.params.row_stats.column = 0);
}

void quantised(const cpu::AttentionArgs& legal) {
  ACCEPTED((void)a);
  REFUSED("bits is 7, expected 0", a.params.bits = 7);
  REFUSED("bits is -1", a.params.bits = -1);
  ACCEPTED(a.params.bits = 3);
  REFUSED("group_size is 16, expected 32, 64 or 128", a.params.group_size = 16);
  REFUSED("head_dim is 32, expected a multiple of group_size, 64", a.params.group_size = 64);
  REFUSED("value_dim is 48, expected a multiple of group_size, 32", a.params.value_dim = 48);
  REFUSED("group_dtype is 3", a.group_dtype = static_cast<Dtype>(3));
  REFUSED("key_scales is null", a.key_scales = nullptr);
  REFUSED("key_biases is null", a.key_biases = nullptr);
  REFUSED("value_scales is null", a.value_scales = nullptr);
  REFUSED("value_biases is null", a.value_biases = nullptr);
  REFUSED("key is at address", a.key = static_cast<const char*>(a.key) + 2);
  REFUSED("key_scales has stride 1 in a dimension of size 1", a.params.key_scales.column = 1);
}

void backward(const cpu::BackwardArgs& legal, const cpu::AttentionArgs& quantised) {
  ACCEPTED((void)a);
  REFUSED("num_heads is 3", a.forward.params.num_heads = 3);
  REFUSED("bits is 4, expected 0: quantised keys and values have no gradient", a.forward = quantised);
  REFUSED("out is null", a.forward.out = nullptr);
  REFUSED("exact_out is null", a.exact_out = nullptr);
  ACCEPTED(a.forward.params.out.row = 0);  // the backward pass reads `out`, but does not write it
  REFUSED("out_gradient is null", a.out_gradient = nullptr);
  ACCEPTED(a.out_gradient_strides = {});
  REFUSED("out_gradient has strides that reach over", a.out_gradient_strides.row = int64_t{1} << 50);
  ACCEPTED(a.lse_gradient = nullptr);
  REFUSED("query_gradient is null", a.query_gradient = nullptr);
  REFUSED("key_gradient is null", a.key_gradient = nullptr);
  REFUSED("value_gradient is null", a.value_gradient = nullptr);
  REFUSED("delta is null", a.delta = nullptr);
  REFUSED("query_gradient shares memory with query", a.query_gradient = const_cast<void*>(a.forward.query));
  REFUSED("value_gradient shares memory with key_gradient", a.key_gradient = a.value_gradient);
  REFUSED("delta shares memory with lse", a.delta = a.forward.lse);
  REFUSED("delta shares memory with row_stats", a.delta = a.forward.row_stats);
}

}  // namespace

int main() {
  Draw draw{std::mt19937(0)};
  Legal plain(false, draw), packed(true, draw);
  GradientCall gradient(plain.c, plain.call, draw_cotangents(plain.c, draw));
  gradient.run();
  sizes(plain.call.args);
  options(plain.call.args);
  pointers(plain.call.args);
  strides(plain.call.args);
  quantised(packed.call.args);
  backward(gradient.args, packed.call.args);
  std::printf("%d expectations\n", expectations);
  return failures;
}
