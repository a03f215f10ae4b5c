// The table itself, and why a kernel cannot run a call.
#include "kernel_table.h"

#include <algorithm>
#include <array>
#include <limits>

#include "limits.h"

namespace flashattn {
namespace {

constexpr int kAny = std::numeric_limits<int>::max(), kByName = -1;

// Which quantised keys and values a kernel takes.
enum class Quantised { none, integers, all };  // integers: of 4 and 8 bits, beside 16-bit queries
constexpr auto none = Quantised::none, integers = Quantised::integers, all = Quantised::all;

struct Row {
  Kernel kernel;
  std::string_view name;
  Backend backend;
  Pass pass;
  // What the kernel can do.
  int max_query_len;
  int max_dim;  // of head_dim and value_dim
  Quantised quantised;
  // Beyond these lengths auto looks further. On Metal they are estimates: they have not been measured on a GPU.
  int auto_query_len;
  int auto_key_len;
  std::string_view why;
  // What else it asks for.
  int max_float_dim = kAny;  // of those of float32
  int only_on = 0;           // this compute capability; 0: any
  int tilings = 1;
};

constexpr auto forward = Pass::forward, backward = Pass::backward;

// auto takes the first row that can run the call and is meant for its lengths.
constexpr std::array<Row, kNumKernels> kTable = {{
    {Kernel::cpu_decode, "cpu_decode", Backend::cpu, forward, kMaxDecodeLen, kMaxHeadDim, all, kAny, kAny,
     "few queries: work is split over the keys"},
    {Kernel::cpu_prefill, "cpu_prefill", Backend::cpu, forward, kAny, kMaxHeadDim, all, kAny, kAny,
     "many queries: work is split over the queries"},
    {Kernel::metal_decode_fast, "metal_decode_fast", Backend::metal, forward, 1, kMaxHeadDim, all, kAny, 128,
     "one query, few keys: one SIMD group a head, no barriers"},
    {Kernel::metal_decode_parallel, "metal_decode_parallel", Backend::metal, forward, 1, kMaxHeadDim, all, kAny, 1024,
     "one query: 32 SIMD groups a head share the keys"},
    {Kernel::metal_decode_split, "metal_decode_split", Backend::metal, forward, 8, kMaxHeadDim, all, kAny, kAny,
     "few queries: the keys are cut into chunks, each read once for all heads of a group", kAny, 0, 3},
    {Kernel::metal_prefill_tg, "metal_prefill_tg", Backend::metal, forward, kAny, 256, none, 64, kAny,
     "a short prompt: the heads of a group share their keys", kAny, 0, 2},
    {Kernel::metal_prefill_reg, "metal_prefill_reg", Backend::metal, forward, kAny, 256, all, kAny, kAny,
     "many queries: output and probabilities stay in registers", kAny, 0, 4},
    {Kernel::metal_rowwise, "metal_rowwise", Backend::metal, forward, kAny, kMaxHeadDim, all, kAny, kAny,
     "head_dim above 256: one thread a score, any size"},
    {Kernel::cuda_decode, "cuda_decode", Backend::cuda, forward, kMaxCudaDecodeLen, kMaxHeadDim, all, kAny, kAny,
     "few queries: the keys are cut into chunks, 16 rows of a group read each once"},
    {Kernel::cuda_prefill_hopper, "cuda_prefill_hopper", Backend::cuda, forward, kAny, 256, none, kAny, kAny,
     "many queries on Hopper: a warpgroup brings the tiles that others multiply", 128, 90},
    {Kernel::cuda_prefill, "cuda_prefill", Backend::cuda, forward, kAny, 256, integers, kAny, kAny,
     "many queries: tensor cores, output and probabilities stay in registers"},
    {Kernel::cuda_prefill_hopper_rounded, "cuda_prefill_hopper_rounded", Backend::cuda, forward, kAny, 256, none,
     kByName, kByName, "by name alone: probabilities are rounded once to 16 bits", 0, 90},
    {Kernel::cuda_prefill_rounded, "cuda_prefill_rounded", Backend::cuda, forward, kAny, 256, none, kByName, kByName,
     "by name alone: probabilities are rounded once to 16 bits", 0},
    {Kernel::cuda_rowwise, "cuda_rowwise", Backend::cuda, forward, kAny, kMaxHeadDim, all, kAny, kAny,
     "one thread a score, any size"},
    {Kernel::cpu_backward, "cpu_backward", Backend::cpu, backward, kAny, kMaxHeadDim, none, kAny, kAny, ""},
    {Kernel::metal_backward_dq, "metal_backward_dq", Backend::metal, backward, kAny, 256, none, kAny, kAny, ""},
    {Kernel::metal_backward_dkv, "metal_backward_dkv", Backend::metal, backward, kAny, 256, none, kAny, kAny, ""},
    {Kernel::cuda_backward_dq, "cuda_backward_dq", Backend::cuda, backward, kAny, 256, none, kAny, kAny, ""},
    {Kernel::cuda_backward_dkv, "cuda_backward_dkv", Backend::cuda, backward, kAny, 256, none, kAny, kAny, ""},
}};

constexpr std::array<std::string_view, 3> kBackendNames = {"cpu", "metal", "cuda"};
constexpr std::array<std::string_view, 3> kBackendsInWords = {"the CPU", "Metal", "CUDA"};

std::string in_words(Backend backend) {
  return std::string(kBackendsInWords[static_cast<int>(backend)]);
}

// 90 as "9.0".
std::string in_words(int compute_capability) {
  return std::to_string(compute_capability / 10) + "." + std::to_string(compute_capability % 10);
}

const Row& row_of(Kernel kernel) {
  for (const Row& row : kTable) {
    if (row.kernel == kernel) {
      return row;
    }
  }
  throw std::logic_error("a kernel is missing from the table");
}

std::string known_names() {
  std::string names = "'auto'";
  for (const Row& row : kTable) {
    if (row.pass == forward) {
      names += ", '" + std::string(row.name) + "'";
    }
  }
  return names;
}

// Why the kernel cannot run the call; empty where it can.
std::string obstacle(const Row& row, Backend backend, CallShape shape) {
  const auto kernel = [&](const std::string& says) { return std::string(row.name) + says; };
  int dim = std::max(shape.head_dim, shape.value_dim);
  if (row.backend != backend) {
    return kernel(" runs on " + in_words(row.backend) + ", the stream does not");
  }
  if (shape.query_len > row.max_query_len) {
    return kernel(" takes up to " + std::to_string(row.max_query_len) + " queries, found " +
                  std::to_string(shape.query_len));
  }
  if (shape.bits != 0 && row.quantised == none) {
    return kernel(" takes no quantised keys and values");
  }
  if (shape.element_size == 4 && dim > row.max_float_dim) {
    return kernel(row.max_float_dim == 0 ? " takes 16-bit floats"
                                         : " takes a head_dim up to " + std::to_string(row.max_float_dim) +
                                               " in float32, found " + std::to_string(dim));
  }
  bool is_integers = (shape.bits == 4 || shape.bits == 8) && shape.element_size == 2;
  if (shape.bits != 0 && row.quantised == integers && !is_integers) {
    return kernel(" takes quantised keys and values of 4 and 8 bits, beside 16-bit queries");
  }
  if (row.only_on != 0 && shape.compute_capability != 0 && shape.compute_capability != row.only_on) {
    return kernel(" runs on compute capability " + in_words(row.only_on) + ", found " +
                  in_words(shape.compute_capability));
  }
  if (dim > row.max_dim) {
    return kernel(" takes a head_dim up to " + std::to_string(row.max_dim) + ", found " + std::to_string(dim));
  }
  return "";
}

}  // namespace

std::string_view name(Kernel kernel) {
  return row_of(kernel).name;
}

std::string name(Tiled tiled) {
  std::string kernel(name(tiled.kernel));
  return tiled.tiling == 0 ? kernel : kernel + "@" + std::to_string(tiled.tiling);
}

int tilings(Kernel kernel) {
  return row_of(kernel).tilings;
}

Backend backend_of(Kernel kernel) {
  return row_of(kernel).backend;
}

Pass pass_of(Kernel kernel) {
  return row_of(kernel).pass;
}

std::string_view name(Backend backend) {
  return kBackendNames[static_cast<int>(backend)];
}

Backend backend_of(std::string_view name) {
  for (size_t i = 0; i < kBackendNames.size(); ++i) {
    if (kBackendNames[i] == name) {
      return static_cast<Backend>(i);
    }
  }
  throw std::invalid_argument("[flash_attention] device is '" + std::string(name) +
                              "', expected 'cpu', 'metal' or 'cuda'");
}

Tiled kernel_of(const Choice& choice) {
  if (!choice.kernel) {
    throw NoKernelError("[flash_attention] " + choice.reason);
  }
  return *choice.kernel;
}

Choice choose(Backend backend, CallShape shape, const std::string& wanted, std::optional<Tiled> preferred,
              Kernels failed) {
  bool known = wanted == "auto";
  if (known && preferred && obstacle(row_of(preferred->kernel), backend, shape).empty()) {
    return {preferred, "the fastest of those that were measured here"};
  }
  for (const Row& row : kTable) {
    if (row.pass != forward) {
      continue;
    }
    for (Tiled tiled = {row.kernel}; wanted.starts_with(row.name) && tiled.tiling < row.tilings; ++tiled.tiling) {
      if (wanted == name(tiled)) {
        std::string reason = obstacle(row, backend, shape);
        return reason.empty() ? Choice{tiled, "asked for by name"} : Choice{std::nullopt, reason};
      }
    }
    bool is_meant = row.backend == backend && shape.query_len <= row.auto_query_len &&
                    shape.key_len <= row.auto_key_len &&
                    (row.only_on == 0 || row.only_on == shape.compute_capability) && with(failed, row.kernel) != failed;
    if (known && is_meant && obstacle(row, backend, shape).empty()) {
      return {Tiled{row.kernel}, std::string(row.why)};
    }
  }
  if (!known) {
    throw std::invalid_argument("[flash_attention] kernel is '" + wanted + "', expected one of " + known_names());
  }
  return {std::nullopt, "there is no kernel for " + in_words(backend)};
}

std::vector<Kernel> backward_kernels(Backend backend) {
  std::vector<Kernel> kernels;
  for (const Row& row : kTable) {
    if (row.pass == backward && row.backend == backend) {
      kernels.push_back(row.kernel);
    }
  }
  return kernels;
}

void check_backward(Backend backend, CallShape shape) {
  if (shape.bits != 0) {
    throw NoKernelError("[flash_attention] no kernel has the gradient with quantised keys and values");
  }
  std::vector<Kernel> kernels = backward_kernels(backend);
  if (kernels.empty()) {
    throw NoKernelError("[flash_attention] there is no kernel for " + in_words(backend) + " that has the gradient");
  }
  for (Kernel kernel : kernels) {
    if (std::string reason = obstacle(row_of(kernel), backend, shape); !reason.empty()) {
      throw NoKernelError("[flash_attention] " + reason);
    }
  }
}

int max_head_dim(Backend backend, Pass pass, bool quantised) {
  int widest = 0;
  for (const Row& row : kTable) {
    if (row.backend == backend && row.pass == pass && (row.quantised != none || !quantised)) {
      widest = std::max(widest, row.max_dim);
    }
  }
  return widest;
}

}  // namespace flashattn
