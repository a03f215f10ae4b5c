// The table of stored decisions. Its key is a CallKey.
#include "decision.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

#include "../call/limits.h"

namespace flashattn {
namespace {

// Rounds numbers of queries above kFew up to a power of two. Smaller numbers stay exact, because kernels may be
// compiled for them.
int rounded_length(int length) {
  return length <= kFew ? length : static_cast<int>(std::bit_ceil(static_cast<unsigned>(length)));
}
int magnitude(int64_t size) {
  return static_cast<int>(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(size - 1, 0))));
}

struct Table {
  std::mutex mutex;
  std::map<CallKey, Settled*> settled;  // never freed: a call may still use an entry that was replaced
};

Table& table() {
  static Table& table = *new Table;  // never destroyed: calls may outlive static destruction
  return table;
}

}  // namespace

CallKey::CallKey(const Inputs& inputs, const Arguments& arguments, mx::Device device) {
  const Options& options = arguments.options;
  const mx::array &query = inputs.query(), &key = inputs.key();
  int key_len = key.shape(kRow);
  add(device.index);
  add(static_cast<int>(arguments.precision));
  add(is_traced(arguments));
  add(rounded_length(query.shape(kRow)));
  add(magnitude(key_len));
  add(magnitude(batch_size(query)));
  add(query.shape(kHead));
  add(key.shape(kHead));
  add(query.shape(kColumn));
  add(columns_of(inputs.value(), options));
  add(options.causal);
  add(options.window > 0 ? 1 + magnitude(std::min(options.window, key_len)) : 0);
  add(options.softcap > 0);
  add(options.bits);
  add(options.group_size);
  for (const InputRule& rule : kInputRules) {
    const mx::array* given = inputs[rule.input];
    add(given ? 1 + static_cast<int>(given->dtype().val()) : 0);
  }
  if (arguments.kernel == "auto") {
    // Lengths that round to the same power of two may have different usual tilings. So the tiling is part of the key.
    bool is_cuda = backend_of(device) == Backend::cuda && query.shape(kRow) > kMaxCudaDecodeLen;
    add(is_cuda ? usual_tiling(Kernel::cuda_prefill, call_shape(inputs, options, Backend::cuda, arguments.precision))
                : 0);
  } else {
    Variant variant = by_table(arguments, backend_of(device)).variant;
    add(1 + static_cast<int>(variant.kernel));
    add(variant.tiling);
  }
}

void settle(const CallKey& key, std::unique_ptr<Settled> settled) {
  std::lock_guard lock(table().mutex);
  Settled*& entry = table().settled[key];
  if (entry) settled->left_calls = entry->left_calls.load();
  entry = settled.release();
}

std::vector<LeftCalls> left_calls() {
  std::vector<LeftCalls> result;
  std::lock_guard lock(table().mutex);
  for (const auto& [key, settled] : table().settled) {
    uint64_t count = settled->left_calls;
    if (count != 0 && settled->left) {
      result.emplace_back(settled->words, settled->left->first, settled->left->second, count);
    }
  }
  return result;
}

void reset_left_calls() {
  std::lock_guard lock(table().mutex);
  for (const auto& [key, settled] : table().settled) settled->left_calls = 0;
}

std::optional<Decision> decided(const Arguments& arguments, Backend backend, mx::Device device) {
  Inputs inputs(arguments);
  if (backend == Backend::cpu || inputs.query().size() == 0) return by_table(arguments, backend);
  CallKey key(inputs, arguments, device);
  std::lock_guard lock(table().mutex);
  auto found = table().settled.find(key);
  if (found == table().settled.end()) return std::nullopt;
  Settled* settled = found->second;
  if (!settled->wrong.empty()) throw NoKernelError("[flash_attention] " + settled->wrong);
  return Decision{.variant = settled->variant,
                  .precision = arguments.precision,
                  .query_len = inputs.query().shape(kRow),
                  .key_len = inputs.key().shape(kRow),
                  .head_dim = inputs.query().shape(kColumn),
                  .value_dim = columns_of(inputs.value(), arguments.options),
                  .by_name = arguments.kernel != "auto",
                  .failed = settled->failed,
                  .left = settled->left ? &settled->left_calls : nullptr};
}

Decision by_table(const Arguments& arguments, Backend backend) {
  Inputs inputs(arguments);
  CallShape shape = call_shape(inputs, arguments.options, backend, arguments.precision);
  return {.variant = chosen_variant(choose(backend, shape, arguments.kernel)),
          .precision = arguments.precision,
          .query_len = shape.query_len,
          .key_len = shape.key_len,
          .head_dim = shape.head_dim,
          .value_dim = shape.value_dim,
          .by_name = arguments.kernel != "auto"};
}

Variant variant_for(const Decision& decision, const Inputs& inputs, const Options& options, Backend backend) {
  CallShape shape = call_shape(inputs, options, backend, decision.precision);
  bool same_sizes = shape.query_len == decision.query_len && shape.key_len == decision.key_len &&
                    shape.head_dim == decision.head_dim && shape.value_dim == decision.value_dim;
  if (same_sizes) return decision.variant;
  return chosen_variant(choose(backend, shape, decision.by_name ? name(decision.variant) : "auto", decision.failed));
}

bool is_traced(const Arguments& arguments) {
  const auto& inputs = arguments.inputs;
  return std::any_of(inputs.begin(), inputs.end(), [](const auto& input) { return input && input->is_tracer(); });
}

}  // namespace flashattn
