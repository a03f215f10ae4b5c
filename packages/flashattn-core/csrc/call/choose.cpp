// The table of kernels, what they cost, and the choice of a kernel for a call.
#include "choose.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <sstream>

#include "fail.h"
#include "mlx_fused.h"
#include "spans.h"

namespace flashattn {
namespace {

constexpr int kAny = std::numeric_limits<int>::max();

// With which queries a kernel takes quantised keys and values.
enum class Quantised { none, with_16_bits, all };
constexpr auto none = Quantised::none, with_16_bits = Quantised::with_16_bits, all = Quantised::all;

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
  bool rounds = false;  // whether the kernel has a variant for Precision::input
};

constexpr auto forward = Pass::forward, backward = Pass::backward;
constexpr bool rounds = true;

#define FLASHATTN_KERNEL_ROW(name, backend, ...) {Kernel::name, #name, Backend::backend, __VA_ARGS__},
constexpr std::array<Row, kNumKernels> kTable = {{
#include "kernels.def"
}};
#undef FLASHATTN_KERNEL_ROW

constexpr std::array<std::string_view, 3> kBackendNames = {"cpu", "metal", "cuda"};
constexpr std::array<std::string_view, 3> kBackendsInWords = {"the CPU", "Metal", "CUDA"};

std::string in_words(Backend backend) {
  return std::string(kBackendsInWords[static_cast<int>(backend)]);
}

const Row& row_of(Kernel kernel) {
  return kTable[static_cast<int>(kernel)];
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

int widest(const Call& call) {
  return std::max(call.params.head_dim, call.params.value_dim);
}

bool is_meant(const Row& row, const Call& call) {
  return call.params.query_len <= row.auto_query_len && call.params.key_len <= row.auto_key_len;
}

// Returns the requested precision if the row's kernel has a variant for it, and float32 otherwise.
Precision precision_of(const Row& row, const Call& call) {
  return row.rounds && size_of(call.dtype) == 2 ? call.precision : Precision::float32;
}

// Returns why the kernel cannot run the call, or an empty string if it can.
std::string obstacle(const Row& row, Backend backend, const Call& call) {
  const AttentionParams& p = call.params;
  const auto kernel = [&](const std::string& says) { return std::string(row.name) + says; };
  if (row.backend != backend) {
    return kernel(" runs on " + in_words(row.backend) + ", but the stream does not");
  }
  if (p.query_len > row.max_query_len) {
    return kernel(" takes up to " + std::to_string(row.max_query_len) + " queries, found " +
                  std::to_string(p.query_len));
  }
  if (p.bits != 0 && row.quantised == none) {
    return kernel(" takes no quantised keys and values");
  }
  if (p.bits != 0 && row.quantised == with_16_bits && size_of(call.dtype) != 2) {
    return kernel(" takes quantised keys and values only with 16-bit queries");
  }
  if (widest(call) > row.max_dim) {
    return kernel(" takes a head_dim up to " + std::to_string(row.max_dim) + ", found " + std::to_string(widest(call)));
  }
  return "";
}

void require(const Row& row, Backend backend, const Call& call) {
  if (std::string reason = obstacle(row, backend, call); !reason.empty()) {
    throw NoKernelError("[flash_attention] " + reason);
  }
}

// On compute capability 9.0, cuda_prefill has large and small query blocks. Small blocks take more time per query row.
// But if a call has few large blocks, some multiprocessors stay idle. With many keys, share_last_blocks() in
// cuda/launch.cpp prevents this, because it splits the keys of the last blocks.
//
// With head_dim <= 64 and Precision::input, large blocks have 256 rows and small blocks 64. The small blocks then take
// only 10 % more time per row, because three of them share a multiprocessor. With 64 < head_dim <= 128, large blocks
// have 192 rows and small blocks 128. The small blocks then take 20 % more time per row.
bool has_small_blocks(const Call& call, const Device& device) {
  constexpr int kManyKeys = 4096;
  const AttentionParams& p = call.params;
  int dim = widest(call);
  if (device.compute_capability != 90 || size_of(call.dtype) != 2 || dim > 128) return false;
  int64_t heads = p.batch_size * p.num_heads;
  bool is_even =
      !call.has(Input::visible) && !call.has(Input::bias) && sees_evenly(p.causal, p.window, p.query_len, p.key_len);
  if (dim <= 64) {
    if (call.precision == Precision::float32) return false;
    constexpr int64_t kRows = 256;
    int64_t rows = (p.query_len + kRows - 1) / kRows * kRows;
    int64_t pairs = visible_pairs(p.causal, p.window, p.query_len, p.key_len);
    bool is_full = 10 * rows <= 11 * int64_t{p.query_len};
    bool sees_many = pairs >= 512 * int64_t{p.query_len};
    // Whether the longest block, whose rows see all keys, has at most 4/3 of a multiprocessor's share of all pairs.
    bool is_balanced = 4 * pairs * heads >= 3 * device.multiprocessors * kRows * p.key_len;
    bool is_split = is_even && p.key_len >= kManyKeys;
    return !(is_full && sees_many && (is_balanced || is_split));
  }
  constexpr double kSlower = 1.2;
  const auto blocks = [&](int rows) { return (p.query_len + rows - 1) / rows * heads; };
  const auto time = [&](int rows) {
    return (blocks(rows) + device.multiprocessors - 1) / device.multiprocessors * rows;
  };
  if (is_even && p.key_len >= kManyKeys && blocks(192) > device.multiprocessors) return false;
  return static_cast<double>(time(192)) > kSlower * static_cast<double>(time(128));
}

struct CostRow {
  Kernel kernel;
  int compute_capability;
  double cost;
  std::string_view source;
};
constexpr CostRow kCosts[] = {
#include "costs.def"
};

Estimate estimate(const Call& call, const Device& device, Kernel kernel) {
  const AttentionParams& p = call.params;
  double pairs = static_cast<double>(visible_pairs(p.causal, p.window, p.query_len, p.key_len));
  pairs *= static_cast<double>(p.batch_size * p.num_heads);
  auto [cost, source] = cost_of(compared_kernel(call, kernel), device);
  return {pairs, cost, source};
}

// MLX skips what a causal mask hides. Under a mask array it computes all pairs on Metal, and does not count on CUDA.
Estimate mlx_estimate(const Call& call) {
  const AttentionParams& p = call.params;
  int64_t pairs = mlx_reads_an_array_mask(call) ? int64_t{p.query_len} * p.key_len
                                                : visible_pairs(p.causal, 0, p.query_len, p.key_len);
  return {static_cast<double>(pairs) * static_cast<double>(p.batch_size * p.num_heads), 1, "by definition"};
}

}  // namespace

std::string_view name(Kernel kernel) {
  return row_of(kernel).name;
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

Kernel compared_kernel(const Call& call, Kernel forward) {
  bool has_gradient = call.is_traced && call.params.bits == 0;
  return has_gradient ? backward_kernels(backend_of(forward)).front() : forward;
}

std::pair<double, std::string_view> cost_of(Kernel kernel, const Device& device) {
  if (device.tuned && device.tuned->cost[static_cast<int>(kernel)] > 0) {
    return {device.tuned->cost[static_cast<int>(kernel)], device.tuned->source};
  }
  for (const CostRow& row : kCosts) {
    if (row.kernel == kernel && device.compute_capability == row.compute_capability) return {row.cost, row.source};
  }
  // One thread per score is many times slower than tensor cores, on every GPU.
  bool is_rowwise = kernel == Kernel::cuda_rowwise || kernel == Kernel::metal_rowwise;
  return {is_rowwise ? 20.0 : 1.5, "never measured"};
}

std::optional<Kernel> kernel_named(std::string_view name) {
  if (name == "auto") return std::nullopt;
  for (const Row& row : kTable) {
    if (row.pass == forward && row.name == name) return row.kernel;
  }
  fail("kernel is '", name, "', expected one of ", known_names());
}

Choice choose(const Call& call, const Device& device, std::optional<Kernel> wanted, Kernels failed) {
  const auto chosen = [&](const Row& row, std::string_view why) {
    bool small = row.kernel == Kernel::cuda_prefill && has_small_blocks(call, device);
    return Choice{.variant = {row.kernel, precision_of(row, call), small}, .why = why};
  };
  if (wanted) {
    require(row_of(*wanted), device.backend, call);
    return chosen(row_of(*wanted), "the call names this kernel");
  }
  for (const Row& row : kTable) {
    bool fits = row.pass == forward && row.backend == device.backend && !contains(failed, row.kernel);
    if (!fits || !is_meant(row, call) || !obstacle(row, device.backend, call).empty()) continue;
    Choice choice = chosen(row, row.why);
    if (device.backend == Backend::cpu) return choice;
    choice.ours = estimate(call, device, row.kernel);
    if (mlx_is_fused(call, device.backend)) choice.mlx = mlx_estimate(call);
    choice.is_left = call.precision == Precision::input && choice.mlx && choice.ours.time() > choice.mlx->time();
    return choice;
  }
  throw NoKernelError("[flash_attention] there is no kernel for " + in_words(device.backend));
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

Variant backward_variant(const Call& call, const Device& device) {
  if (call.params.bits != 0) {
    throw NoKernelError("[flash_attention] no kernel computes the gradient with quantised keys and values");
  }
  std::vector<Kernel> kernels = backward_kernels(device.backend);
  for (Kernel kernel : kernels) require(row_of(kernel), device.backend, call);
  return {kernels.front(), precision_of(row_of(kernels.front()), call)};
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

Costs read_costs(const std::string& text) {
  Costs costs;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.starts_with("//")) continue;
    char kernel[32], source[256];
    int compute_capability = 0;
    double cost = 0;
    if (std::sscanf(line.c_str(), "{Kernel::%31[a-z_], %d, %lf, \"%255[^\"]\"},", kernel, &compute_capability, &cost,
                    source) != 4 ||
        !(cost > 0)) {
      fail("a line of measured costs is '", line, "', expected {Kernel::name, compute capability, cost, \"source\"},");
    }
    for (const Row& row : kTable) {
      if (row.name == kernel) costs.cost[static_cast<int>(row.kernel)] = cost;
    }
    costs.source = source;
  }
  return costs;
}

}  // namespace flashattn
