// The table itself, and why a kernel cannot run a call.
#include "dispatch.h"

#include <algorithm>
#include <array>
#include <limits>

#include "cpu/attention.h"
#include "metal/launch.h"

namespace flashattn {
namespace {

constexpr int kAny = std::numeric_limits<int>::max();

struct Row {
  Kernel kernel;
  std::string_view name;
  Backend backend;
  // What the kernel can do.
  int max_query_len;
  int max_dim;     // of head_dim and value_dim
  bool quantised;  // also takes quantised keys and values
  // Where auto prefers the next row. On Metal these lengths are estimates: they have not been measured on a GPU.
  int auto_query_len;
  int auto_key_len;
  std::string_view why;
};

// auto takes the first row that covers the call and prefers it.
constexpr std::array<Row, 8> kTable = {{
    {Kernel::cpu_decode, "cpu_decode", Backend::cpu, cpu::kMaxDecodeLen, kAny, true, kAny, kAny,
     "few queries: work is split over the keys"},
    {Kernel::cpu_prefill, "cpu_prefill", Backend::cpu, kAny, kAny, true, kAny, kAny,
     "many queries: work is split over the queries"},
    {Kernel::metal_decode_fast, "metal_decode_fast", Backend::metal, 1, kAny, true, kAny, 128,
     "one query, few keys: one SIMD group a head, no barriers"},
    {Kernel::metal_decode_parallel, "metal_decode_parallel", Backend::metal, 1, kAny, true, kAny, 1024,
     "one query: 32 SIMD groups a head share the keys"},
    {Kernel::metal_decode_split, "metal_decode_split", Backend::metal, 8, kAny, true, kAny, kAny,
     "few queries: the keys are cut into chunks, each read once for all heads of a group"},
    {Kernel::metal_prefill_tg, "metal_prefill_tg", Backend::metal, kAny, 256, false, 64, kAny,
     "a short prompt: the heads of a group share their keys"},
    {Kernel::metal_prefill_reg, "metal_prefill_reg", Backend::metal, kAny, 256, true, kAny, kAny,
     "many queries: output and probabilities stay in registers"},
    {Kernel::metal_rowwise, "metal_rowwise", Backend::metal, kAny, kAny, true, kAny, kAny,
     "head_dim above 256: one thread a score, any size"},
}};

std::string known_names() {
  std::string names = "'auto'";
  for (const Row& row : kTable) {
    names += ", '" + std::string(row.name) + "'";
  }
  return names;
}

// Why the kernel cannot run the call; empty where it can.
std::string obstacle(const Row& row, Backend backend, CallShape shape) {
  std::string name(row.name);
  int dim = std::max(shape.head_dim, shape.value_dim);
  if (row.backend != backend) {
    return name + (row.backend == Backend::cpu ? " runs on the CPU" : " runs on a GPU") + ", the stream does not";
  }
  if (shape.query_len > row.max_query_len) {
    return name + " takes up to " + std::to_string(row.max_query_len) + " queries, found " +
           std::to_string(shape.query_len);
  }
  if (shape.quantised && !row.quantised) {
    return name + " takes no quantised keys and values";
  }
  if (dim > row.max_dim) {
    return name + " takes a head_dim up to " + std::to_string(row.max_dim) + ", found " + std::to_string(dim);
  }
  return "";
}

}  // namespace

std::string_view name(Kernel kernel) {
  switch (kernel) {  // those that are not in the table
    case Kernel::cpu_backward: return "cpu_backward";
    case Kernel::metal_backward_dq: return "metal_backward_dq";
    case Kernel::metal_backward_dkv: return "metal_backward_dkv";
    default: break;
  }
  for (const Row& row : kTable) {
    if (row.kernel == kernel) {
      return row.name;
    }
  }
  throw std::logic_error("a kernel is missing from the table");
}

Kernel kernel_of(const Choice& choice) {
  if (!choice.kernel) {
    throw NoKernelError("[flash_attention] " + choice.reason);
  }
  return *choice.kernel;
}

void check_backward(Backend backend, CallShape shape) {
  if (shape.quantised) {
    throw NoKernelError("[flash_attention] no kernel has the gradient with quantised keys and values");
  }
  int dim = std::max(shape.head_dim, shape.value_dim);
  if (backend == Backend::metal && dim > metal::kMaxBackwardDim) {
    throw NoKernelError("[flash_attention] metal_backward_dq and metal_backward_dkv take a head_dim up to " +
                        std::to_string(metal::kMaxBackwardDim) + ", found " + std::to_string(dim));
  }
}

Choice choose(Backend backend, CallShape shape, const std::string& wanted) {
  for (const Row& row : kTable) {
    if (wanted == row.name) {
      std::string reason = obstacle(row, backend, shape);
      return reason.empty() ? Choice{row.kernel, "asked for by name"} : Choice{std::nullopt, reason};
    }
    bool preferred = shape.query_len <= row.auto_query_len && shape.key_len <= row.auto_key_len;
    if (wanted == "auto" && preferred && obstacle(row, backend, shape).empty()) {
      return {row.kernel, std::string(row.why)};
    }
  }
  if (wanted == "auto") {
    throw std::logic_error("the table's last row of a backend covers every call");
  }
  throw std::invalid_argument("[flash_attention] kernel is '" + wanted + "', expected one of " + known_names());
}

}  // namespace flashattn
