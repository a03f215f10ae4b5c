#include "dispatch.h"

#include <array>
#include <stdexcept>

#include "cpu/attention.h"

namespace flashattn {
namespace {

struct Row {
  Kernel kernel;
  std::string_view name;
  Backend backend;
  int max_query_len;     // 0: any
  std::string_view why;  // auto takes the first row that covers the call
};

constexpr std::array<Row, kNumKernels> kTable = {{
    {Kernel::cpu_decode, "cpu_decode", Backend::cpu, cpu::kMaxDecodeLen, "few queries: work is split over the keys"},
    {Kernel::cpu_prefill, "cpu_prefill", Backend::cpu, 0, "many queries: work is split over the queries"},
}};

std::string known_names() {
  std::string names = "'auto'";
  for (const Row& row : kTable) {
    names += ", '" + std::string(row.name) + "'";
  }
  return names;
}

}  // namespace

std::string_view name(Kernel kernel) {
  for (const Row& row : kTable) {
    if (row.kernel == kernel) {
      return row.name;
    }
  }
  throw std::logic_error("a kernel is missing from the table");
}

Choice choose(Backend backend, int query_len, const std::string& wanted) {
  bool known = wanted == "auto";
  std::string reason = "this build of flashattn-core has no Metal kernels";
  for (const Row& row : kTable) {
    if (wanted != "auto" && wanted != row.name) {
      continue;
    }
    known = true;
    if (row.backend != backend) {
      if (wanted != "auto") {
        reason = wanted + " runs on the CPU, the stream does not";
      }
      continue;
    }
    if (row.max_query_len > 0 && query_len > row.max_query_len) {
      reason = std::string(row.name) + " takes up to " + std::to_string(row.max_query_len) + " queries, found " +
               std::to_string(query_len);
      continue;
    }
    return {row.kernel, wanted == "auto" ? std::string(row.why) : "asked for by name"};
  }
  if (!known) {
    throw std::invalid_argument("[flash_attention] kernel is '" + wanted + "', expected one of " + known_names());
  }
  return {std::nullopt, reason};
}

}  // namespace flashattn
