// The launches of one call on a GPU, as plain data without GPU or MLX types, so that any machine can compute and test
// them. A backend's launch.cpp makes them, and its encode.cpp hands them to MLX.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "../call/call.h"

namespace flashattn::gpu {

// Calls X with the names of all kernel arguments that are not in inputs.def.
#define FLASHATTN_FURTHER_BINDINGS(X)                                             \
  X(params) /* AttentionParams */                                                 \
  /* These are outputs of the forward pass, and inputs of the gradient. */        \
  X(out)                                                                          \
  X(lse)                                                                          \
  X(row_stats)                                                                    \
  X(partials) /* float32 scratch for Partials, or for CUDA's BlockPartials */     \
  X(split)    /* SplitParams */                                                   \
  /* Only the gradient has these. */                                              \
  X(dout)  /* upstream gradient of out */                                         \
  X(dlse)  /* upstream gradient of lse */                                         \
  X(delta) /* (*B, H_q, L), float32; the gradient's first launch writes it */     \
  X(dq)                                                                           \
  X(dk)                                                                           \
  X(dv)                                                                           \
  X(backward) /* BackwardParams */                                                \
  /* Scratch of CUDA's gradient. saved_rows has four numbers per query. dk_parts  \
     and dv_parts are sums of dk and dv over some of a group's heads. */          \
  X(saved_rows)                                                                   \
  X(dk_parts)                                                                     \
  X(dv_parts)                                                                     \
  /* Scratch of cuda_decode: counts the blocks that have finished their chunk. */ \
  X(arrivals)                                                                     \
  /* Scratch of CUDA's kernels: float32 or quantised arrays, split into arrays    \
     of 16-bit parts, see float_parts.h. */                                       \
  X(key_parts)                                                                    \
  X(value_parts)                                                                  \
  X(query_parts)                                                                  \
  X(dout_parts)                                                                   \
  /* Arguments of the kernel that computes a mask's block map. */                 \
  X(array_params) /* ArrayParams of the mask */                                   \
  X(mask)                                                                         \
  X(found_blocks)                                                                 \
  /* Optional output of the forward pass: out in float32, before it is rounded.   \
     It has the strides of out. The gradient's kernels get it as `out`. */        \
  X(exact_out)

// The arrays of the launch that appends rows to a quantised cache, which has none of the others. An old array is
// missing if the launch writes in place.
#define FLASHATTN_CACHE_BINDINGS(X) \
  X(new_keys)                       \
  X(new_values)                     \
  X(old_key_words)                  \
  X(old_key_scales)                 \
  X(old_key_biases)                 \
  X(old_value_words)                \
  X(old_value_scales)               \
  X(old_value_biases)               \
  X(stored_key_words)               \
  X(stored_key_scales)              \
  X(stored_key_biases)              \
  X(stored_value_words)             \
  X(stored_value_scales)            \
  X(stored_value_biases)

#define FLASHATTN_ENUMERATOR(name, ...) name,
enum class Binding {
  FLASHATTN_INPUTS(FLASHATTN_ENUMERATOR) FLASHATTN_FURTHER_BINDINGS(FLASHATTN_ENUMERATOR) count,
  FLASHATTN_CACHE_BINDINGS(FLASHATTN_ENUMERATOR) end
};
#undef FLASHATTN_ENUMERATOR

constexpr int kNumBindings = static_cast<int>(Binding::count);

constexpr bool is_of_cache(Binding binding) {
  return binding > Binding::count;
}
// An array's place among the arrays of its launch.
constexpr int index(Binding binding) {
  return static_cast<int>(binding) - (is_of_cache(binding) ? kNumBindings + 1 : 0);
}
constexpr Binding binding_of(Input input) {
  return static_cast<Binding>(flashattn::index(input));
}
std::string_view name(Binding binding);

// How a launch uses an argument: arrays are inputs or outputs, and structs are passed by value.
enum class Role { input, output, value };

struct Argument {
  Binding binding;
  Role role;

  bool operator==(const Argument&) const = default;
};

// A compile-time constant of a kernel. Constants such as has_softcap remove the code of features that a call lacks.
struct Constant {
  std::string_view name;
  std::variant<bool, int32_t> value;

  bool operator==(const Constant&) const = default;
};

using Size = std::array<uint32_t, 3>;

// A 16-bit array as the tensor memory accelerator (TMA) sees it: the TMA copies boxes of box_rows rows and 64 columns.
struct MappedArray {
  Binding array;
  int box_rows;
  std::array<int64_t, 4> sizes;  // numbers of columns, rows, heads and batch elements
  std::array<int64_t, 3> steps;  // strides of rows, heads and batch elements, in elements
};

struct Launch {
  std::string source;                // the kernel's file, without its ending: "decode_split"
  std::string function;              // the entry point's name: "metal_decode_split_half_64_64_8"
  std::string instantiation;         // the template with its arguments: "decode_split<half, Sizes>"
  std::vector<Constant> sizes = {};  // the fields of Sizes: {"dim", 64}, {"value_dim", 64}, {"rows", 8}
  std::vector<Constant> constants;
  std::string specialisation;  // the key of a compiled kernel, made of the function name and the constants' values
  std::vector<Argument> arguments;
  Size grid;         // in threadgroups
  Size threadgroup;  // in threads

  // CUDA only.
  uint32_t dynamic_shared = 0;  // bytes of dynamic shared memory per block
  int blocks_at_once = 1;       // the compiler limits registers so that this many blocks fit on a multiprocessor
  bool with_next = false;       // the next launch may start before this one ends
  std::vector<MappedArray> tensor_maps = {};  // in the order keys, values, queries, dout; the last ones may be missing
};

// Memory that a call's launches write and read: `elements` numbers of 32 bits. It lives until the last launch is done.
struct Scratch {
  Binding binding;
  int64_t elements;
};

// The launches of one call, in order. A launch waits for earlier ones whose outputs it reads.
struct Launches {
  std::vector<Launch> launches = {};
  std::vector<Scratch> scratch = {};
  // The values of arguments with Role::value.
  AttentionParams params = {};
  SplitParams split = {};
  BackwardParams backward = {};
  ArrayParams array = {};
};

// The bytes of an argument that has Role::value.
std::span<const std::byte> value_of(const Launches& launches, Binding binding);

// A call on a GPU, with what is known once its arrays are evaluated.
struct GpuCall : flashattn::Call {
  std::array<bool, kNumBindings> aligned = {};  // which arrays begin at a multiple of 16 bytes
  Device device = {};
  bool small_blocks = false;                            // see Variant in choose.h
  bool has_row_results = false, has_exact_out = false;  // whether there are lse and row_stats, and exact_out
};

}  // namespace flashattn::gpu
