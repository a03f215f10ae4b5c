// The table of kernels, and the choice of a kernel for a call.
#include "kernel_table.h"

#include <algorithm>
#include <array>
#include <limits>

#include "limits.h"

namespace flashattn {
namespace {

constexpr int kAny = std::numeric_limits<int>::max();

// Which quantised keys and values a kernel takes. `integers` means 4 or 8 bits, with 16-bit queries.
enum class Quantised { none, integers, all };
constexpr auto none = Quantised::none, integers = Quantised::integers, all = Quantised::all;

struct Row {
  Kernel kernel;
  std::string_view name;
  Backend backend;
  Pass pass;
  // The calls that the kernel can run.
  int max_query_len;
  int max_dim;  // the largest head_dim and value_dim
  Quantised quantised;
  // The largest lengths for which "auto" takes the kernel.
  int auto_query_len;
  int auto_key_len;
  std::string_view why;
  int tilings = 1;
  bool is_timed = false;  // auto_query_len and auto_key_len are estimates, so each machine times the kernel
  bool rounds = false;    // whether the kernel has a variant for Precision::input
};

constexpr auto forward = Pass::forward, backward = Pass::backward;
constexpr bool timed = true, rounds = true;

// "auto" takes the first row whose kernel can run the call and whose auto_query_len and auto_key_len are large enough.
constexpr std::array<Row, kNumKernels> kTable = {{
    {Kernel::cpu_decode, "cpu_decode", Backend::cpu, forward, kMaxDecodeLen, kMaxHeadDim, all, kAny, kAny,
     "few queries: work is split over the keys"},
    {Kernel::cpu_prefill, "cpu_prefill", Backend::cpu, forward, kAny, kMaxHeadDim, all, kAny, kAny,
     "many queries: work is split over the queries"},
    {Kernel::metal_decode_fast, "metal_decode_fast", Backend::metal, forward, 1, kMaxHeadDim, all, kAny, 128,
     "one query, few keys: one SIMD group per head, no barriers", 1, timed},
    {Kernel::metal_decode_parallel, "metal_decode_parallel", Backend::metal, forward, 1, kMaxHeadDim, all, kAny, 1024,
     "one query: 32 SIMD groups per head share the keys", 1, timed},
    {Kernel::metal_decode_split, "metal_decode_split", Backend::metal, forward, 8, kMaxHeadDim, all, kAny, kAny,
     "few queries: the keys are cut into chunks, each read once for all heads of a group", 3, timed},
    {Kernel::metal_prefill_tg, "metal_prefill_tg", Backend::metal, forward, kAny, 256, none, 64, kAny,
     "a short prompt: the heads of a group share their keys", 2, timed},
    {Kernel::metal_prefill_reg, "metal_prefill_reg", Backend::metal, forward, kAny, 256, all, kAny, kAny,
     "many queries: output and probabilities stay in registers", 4, timed},
    {Kernel::metal_rowwise, "metal_rowwise", Backend::metal, forward, kAny, kMaxHeadDim, all, kAny, kAny,
     "head_dim above 256: one thread per score, any size"},
    {Kernel::cuda_decode, "cuda_decode", Backend::cuda, forward, kMaxCudaDecodeLen, kMaxHeadDim, all, kAny, kAny,
     "few queries: the keys are cut into chunks, each read once for 16 rows of a group"},
    {Kernel::cuda_prefill, "cuda_prefill", Backend::cuda, forward, kAny, 256, integers, kAny, kAny,
     "many queries: tensor cores, output and probabilities stay in registers", 2, !timed, rounds},
    {Kernel::cuda_rowwise, "cuda_rowwise", Backend::cuda, forward, kAny, kMaxHeadDim, all, kAny, kAny,
     "one thread per score, any size"},
    {Kernel::cpu_backward, "cpu_backward", Backend::cpu, backward, kAny, kMaxHeadDim, none, kAny, kAny, ""},
    {Kernel::metal_backward_dq, "metal_backward_dq", Backend::metal, backward, kAny, 256, none, kAny, kAny, ""},
    {Kernel::metal_backward_dkv, "metal_backward_dkv", Backend::metal, backward, kAny, 256, none, kAny, kAny, ""},
    {Kernel::cuda_backward_dq, "cuda_backward_dq", Backend::cuda, backward, kAny, 256, none, kAny, kAny, "", 1, !timed,
     rounds},
    {Kernel::cuda_backward_dkv, "cuda_backward_dkv", Backend::cuda, backward, kAny, 256, none, kAny, kAny, "", 1,
     !timed, rounds},
}};

constexpr std::array<std::string_view, 3> kBackendNames = {"cpu", "metal", "cuda"};
constexpr std::array<std::string_view, 3> kBackendsInWords = {"the CPU", "Metal", "CUDA"};

std::string in_words(Backend backend) {
  return std::string(kBackendsInWords[static_cast<int>(backend)]);
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

bool is_meant(const Row& row, CallShape shape) {
  return shape.query_len <= row.auto_query_len && shape.key_len <= row.auto_key_len;
}

// Returns the requested precision if the row's kernel has a variant for it, and float32 otherwise.
Precision precision_of(const Row& row, CallShape shape) {
  return row.rounds && shape.bits == 0 && shape.element_size == 2 ? shape.precision : Precision::float32;
}

// Returns why the kernel cannot run the call, or an empty string if it can.
std::string obstacle(const Row& row, Backend backend, CallShape shape) {
  const auto kernel = [&](const std::string& says) { return std::string(row.name) + says; };
  int dim = std::max(shape.head_dim, shape.value_dim);
  if (row.backend != backend) {
    return kernel(" runs on " + in_words(row.backend) + ", but the stream does not");
  }
  if (shape.query_len > row.max_query_len) {
    return kernel(" takes up to " + std::to_string(row.max_query_len) + " queries, found " +
                  std::to_string(shape.query_len));
  }
  if (shape.bits != 0 && row.quantised == none) {
    return kernel(" takes no quantised keys and values");
  }
  bool is_integers = (shape.bits == 4 || shape.bits == 8) && shape.element_size == 2;
  if (shape.bits != 0 && row.quantised == integers && !is_integers) {
    return kernel(" takes quantised keys and values only with 4 or 8 bits and 16-bit queries");
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

std::string name(Variant variant) {
  std::string kernel(name(variant.kernel));
  return variant.tiling == 0 ? kernel : kernel + "@" + std::to_string(variant.tiling);
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

Variant chosen_variant(const Choice& choice) {
  if (!choice.kernel) {
    throw NoKernelError("[flash_attention] " + choice.reason);
  }
  return *choice.kernel;
}

Choice choose(Backend backend, CallShape shape, const std::string& wanted, Kernels failed) {
  bool is_auto = wanted == "auto";
  for (const Row& row : kTable) {
    if (row.pass != forward) {
      continue;
    }
    Variant variant = {row.kernel, 0, precision_of(row, shape)};
    for (; wanted.starts_with(row.name) && variant.tiling < row.tilings; ++variant.tiling) {
      if (wanted == name(variant)) {
        std::string reason = obstacle(row, backend, shape);
        return reason.empty() ? Choice{variant, "the call names this kernel"} : Choice{std::nullopt, reason};
      }
    }
    if (is_auto && is_meant(row, shape) && !contains(failed, row.kernel) && obstacle(row, backend, shape).empty()) {
      variant.tiling = usual_tiling(row.kernel, shape);
      return {variant, std::string(row.why)};
    }
  }
  if (!is_auto) {
    throw std::invalid_argument("[flash_attention] kernel is '" + wanted + "', expected one of " + known_names());
  }
  return {std::nullopt, "there is no kernel for " + in_words(backend)};
}

// On compute capability 9.0, cuda_prefill has two tilings: tiling 0 has larger query blocks than tiling 1. Small blocks
// take more time per query row. But if a call has few large blocks, some multiprocessors stay idle. With many keys,
// share_last_blocks() in cuda/launch.cpp prevents this, because it splits the keys of the last blocks.
//
// With head_dim <= 64 and Precision::input, large blocks have 256 rows and small blocks 64. The small blocks then take
// only 10 % more time per row, because three of them share a multiprocessor. With 64 < head_dim <= 128, large blocks
// have 192 rows and small blocks 128. The small blocks then take 20 % more time per row.
int usual_tiling(Kernel kernel, CallShape shape) {
  constexpr int kManyKeys = 4096;
  int dim = std::max(shape.head_dim, shape.value_dim);
  bool of_hopper =
      kernel == Kernel::cuda_prefill && shape.compute_capability == 90 && shape.element_size == 2 && shape.bits == 0;
  if (!of_hopper || dim > 128 || (dim <= 64 && shape.precision == Precision::float32)) return 0;
  if (dim <= 64) {
    constexpr int64_t kRows = 256;
    int64_t rows = (shape.query_len + kRows - 1) / kRows * kRows;
    bool is_full = 10 * rows <= 11 * int64_t{shape.query_len};
    bool sees_many = shape.pairs >= 512 * int64_t{shape.query_len};
    // Whether the longest block, whose rows see all keys, has at most 4/3 of a multiprocessor's share of all pairs.
    bool is_balanced = 4 * shape.pairs * shape.heads >= 3 * shape.multiprocessors * kRows * shape.key_len;
    bool is_split = shape.is_even && shape.key_len >= kManyKeys;
    return is_full && sees_many && (is_balanced || is_split) ? 0 : 1;
  }
  constexpr double kSlower = 1.2;
  const auto blocks = [&](int rows) { return (shape.query_len + rows - 1) / rows * shape.heads; };
  const auto time = [&](int rows) { return (blocks(rows) + shape.multiprocessors - 1) / shape.multiprocessors * rows; };
  if (shape.is_even && shape.key_len >= kManyKeys && blocks(192) > shape.multiprocessors) return 0;
  return static_cast<double>(time(192)) > kSlower * static_cast<double>(time(128)) ? 1 : 0;
}

std::vector<Candidate> candidates(Backend backend, CallShape shape) {
  std::vector<Candidate> result;
  for (bool meant : {true, false}) {
    for (const Row& row : kTable) {
      if (row.pass != forward || is_meant(row, shape) != meant || !obstacle(row, backend, shape).empty()) continue;
      if (!row.is_timed) {
        result.push_back({{row.kernel, usual_tiling(row.kernel, shape), precision_of(row, shape)}, false});
      }
      for (int tiling = 0; row.is_timed && tiling < row.tilings; ++tiling) {
        result.push_back({{row.kernel, tiling, precision_of(row, shape)}, true});
      }
    }
  }
  return result;
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
    throw NoKernelError("[flash_attention] no kernel computes the gradient with quantised keys and values");
  }
  for (Kernel kernel : backward_kernels(backend)) {
    if (std::string reason = obstacle(row_of(kernel), backend, shape); !reason.empty()) {
      throw NoKernelError("[flash_attention] " + reason);
    }
  }
}

Variant backward_variant(Backend backend, CallShape shape) {
  Kernel kernel = backward_kernels(backend).front();
  return {kernel, 0, precision_of(row_of(kernel), shape)};
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
