// threadgroup_barrier and simdgroup_barrier. They pass the caller's line on, because it identifies the barrier.
#pragma once

#define MSL_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

#ifdef MSL_CHECK_ADDRESS_SPACES
METAL_FUNC void threadgroup_barrier(mem_flags) {}
METAL_FUNC void simdgroup_barrier(mem_flags) {}
#else
static_assert((int)mem_flags::mem_device == kFenceDevice && (int)mem_flags::mem_threadgroup == kFenceThreadgroup);
METAL_FUNC void threadgroup_barrier(mem_flags flags, MSL_PLACE) {
  msl_threadgroup_barrier((int)flags, true, file, line);
}
METAL_FUNC void simdgroup_barrier(mem_flags, MSL_PLACE) {
  static constexpr MslOperation operation{"simdgroup_barrier", kCountNothing, nullptr};
  msl_simdgroup_operation(&operation, nullptr, nullptr, 0, file, line);
}
#endif
}  // namespace metal
