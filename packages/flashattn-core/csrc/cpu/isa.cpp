// Chooses the instruction set, once per process.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace flashattn::cpu {

#define FLASHATTN_DECLARE(isa)  \
  namespace isa {               \
  extern const Kernels kernels; \
  }
FLASHATTN_DECLARE(avx512)
FLASHATTN_DECLARE(avx2)
FLASHATTN_DECLARE(neon)
FLASHATTN_DECLARE(baseline)

namespace {

struct InstructionSet {
  const char* name;  // the value of FLASHATTN_CPU_ISA that selects it
  bool is_here;      // whether this machine runs it
  const Kernels* kernels;
};

#ifdef FLASHATTN_HAS_avx2
// __builtin_cpu_supports() knows "f16c" only in newer compilers.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}
#endif

// The instruction sets for which CMakeLists.txt has built kernels, the best first.
std::vector<InstructionSet> instruction_sets() {
  return {
#ifdef FLASHATTN_HAS_avx512
      {"avx512",
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl"),
       &avx512::kernels},
#endif
#ifdef FLASHATTN_HAS_avx2
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(), &avx2::kernels},
#endif
#ifdef FLASHATTN_HAS_neon
      {"neon", true, &neon::kernels},
#endif
#ifdef FLASHATTN_HAS_baseline
      {"baseline", true, &baseline::kernels},
#endif
  };
}

const Kernels& chosen_kernels() {
  const char* wanted = std::getenv("FLASHATTN_CPU_ISA");
  std::string available;
  for (const InstructionSet& set : instruction_sets()) {
    if (set.is_here && (wanted == nullptr || std::string(wanted) == set.name)) {
      return *set.kernels;
    }
    if (set.is_here) {
      available += (available.empty() ? "" : ", ") + std::string(set.name);
    }
  }
  if (wanted == nullptr) {
    throw std::runtime_error("[flash_attention] this build has no code for an instruction set that this machine has");
  }
  throw std::invalid_argument("[flash_attention] FLASHATTN_CPU_ISA is '" + std::string(wanted) +
                              "', expected one that this machine runs: " + available);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = chosen_kernels();  // if this throws, the next call tries again
  return chosen;
}

void initialise() {
  kernels();
  num_threads();
}

std::string describe() {
  int threads = num_threads();
  return std::string(kernels().name) + ", " + std::to_string(threads) + (threads == 1 ? " thread" : " threads");
}

}  // namespace flashattn::cpu
