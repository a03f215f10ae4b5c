// Selects kernels, and keeps the verdicts of checks for this process, by all that a call's programs are compiled for.
#include "select.h"

#include <array>
#include <map>
#include <mutex>

#include "counts.h"

namespace flashattn {
namespace {

// Calls with equal keys run the same programs, whatever their lengths, heads, batches and strides.
using ProgramKey = std::array<int32_t, 20>;

ProgramKey program_key(Variant variant, const Call& call, const Device& device) {
  const AttentionParams& p = call.params;
  int exact = max_exact_queries(device.backend);
  int32_t given = 0;
  for (int i = 0; i < kNumInputs; ++i) given |= int32_t{call.given[i]} << i;
  return {static_cast<int32_t>(variant.kernel),
          static_cast<int32_t>(variant.precision),
          variant.small_blocks,
          saves_exact_out(call, device.backend),
          device.index,
          static_cast<int32_t>(call.dtype),
          static_cast<int32_t>(call.bias_dtype),
          static_cast<int32_t>(call.sinks_dtype),
          static_cast<int32_t>(call.group_dtype),
          p.head_dim,
          p.value_dim,
          p.num_kv_heads > 0 ? p.num_heads / p.num_kv_heads : 0,
          p.query_len <= exact ? p.query_len : exact + 1,
          p.causal,
          p.window > 0,
          p.softcap > 0,
          has_extreme_softcap(p),
          p.bits,
          p.group_size,
          given};
}

struct Verdicts {
  std::mutex mutex;
  std::map<ProgramKey, std::string> wrong;
};

Verdicts& verdicts() {
  static Verdicts& verdicts = *new Verdicts;  // never destroyed: calls may outlive static destruction
  return verdicts;
}

// Returns what is wrong with the programs of this variant; "" if nothing is.
std::string verdict(Variant variant, const Call& call, const Device& device, const Check& check) {
  ProgramKey key = program_key(variant, call, device);
  {
    std::lock_guard lock(verdicts().mutex);
    if (auto found = verdicts().wrong.find(key); found != verdicts().wrong.end()) return found->second;
  }
  std::string wrong = check(variant);  // without the lock, because the check runs calls; two threads may run it
  std::lock_guard lock(verdicts().mutex);
  return verdicts().wrong.try_emplace(key, wrong).first->second;
}

}  // namespace

Variant variant_for(const Selection& selection, const Call& call, const Device& device) {
  Variant variant = choose(call, device, selection.kernel, selection.failed).variant;
  variant.small_blocks = selection.small_blocks.value_or(variant.small_blocks);
  return variant;
}

std::optional<Selection> select(const Arguments& arguments, const Call& call, const Device& device, bool may_leave,
                                const Check& check) {
  Selection selection = {.kernel = arguments.kernel};
  std::string first_wrong;
  for (;;) {
    Choice choice;
    try {
      choice = choose(call, device, arguments.kernel, selection.failed);
    } catch (const NoKernelError&) {
      if (first_wrong.empty()) throw;
      throw NoKernelError("[flash_attention] " + first_wrong);
    }
    if (device.backend == Backend::cpu || Inputs(arguments).query().size() == 0) return selection;
    if (may_leave && choice.is_left) {
      count(compared_kernel(call, choice.variant.kernel), left_calls);
      return std::nullopt;
    }
    std::string wrong = verdict(choice.variant, call, device, check);
    if (wrong.empty()) break;
    if (first_wrong.empty()) first_wrong = wrong;
    if (arguments.kernel) throw NoKernelError("[flash_attention] " + wrong);
    selection.failed = with(selection.failed, choice.variant.kernel);
  }
  if (call.is_traced && call.params.bits == 0) {
    std::optional<Variant> gradient;
    try {
      gradient = backward_variant(call, device);
    } catch (const NoKernelError&) {  // the error is raised if somebody asks for the gradient
    }
    if (gradient) {
      std::string wrong = verdict(*gradient, call, device, check);
      if (!wrong.empty()) throw NoKernelError("[flash_attention] " + wrong);
    }
  }
  return selection;
}

Kernels failed_before(const Call& call, const Device& device) {
  Kernels failed = 0;
  std::lock_guard lock(verdicts().mutex);
  for (const auto& [key, wrong] : verdicts().wrong) {
    Variant variant = {static_cast<Kernel>(key[0]), static_cast<Precision>(key[1]), key[2] != 0};
    bool is_same = program_key(variant, call, device) == key;
    if (is_same && !wrong.empty()) failed = with(failed, variant.kernel);
  }
  return failed;
}

}  // namespace flashattn
