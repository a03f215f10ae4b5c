// What to run on a GPU for one call, as plain data: no GPU and no MLX in here, so that the whole of it is computed and
// tested on any machine. A backend's launch.cpp makes it, its encode.cpp hands it to MLX.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "../call/dtype.h"
#include "../call/inputs.h"
#include "../call/params.h"
#include "../call/precision.h"

namespace flashattn::gpu {

// What a kernel's arguments are bound to, behind the inputs of inputs.def: X(name).
#define FLASHATTN_FURTHER_BINDINGS(X)                                                \
  X(params) /* AttentionParams */                                                    \
  /* Outputs of the forward pass, inputs of the gradient. */                         \
  X(out)                                                                             \
  X(lse)                                                                             \
  X(row_stats)                                                                       \
  X(partials) /* Partials of decode_split.h or of shared_keys.h, float32 scratch */  \
  X(split)    /* SplitParams */                                                      \
  /* Of the gradient. */                                                             \
  X(dout)  /* what comes back for out */                                             \
  X(dlse)  /* and for lse; optional */                                               \
  X(delta) /* (*B, H_q, L), float32: the first launch writes it */                   \
  X(dq)                                                                              \
  X(dk)                                                                              \
  X(dv)                                                                              \
  X(backward) /* BackwardParams */                                                   \
  /* Of the gradient on CUDA, scratch: four numbers of each query, and what some     \
     heads add to dk and dv. */                                                      \
  X(saved_rows)                                                                      \
  X(dk_parts)                                                                        \
  X(dv_parts)                                                                        \
  /* Of a copy of an array that begins in the middle of an element. */               \
  X(misaligned)                                                                      \
  X(realigned)                                                                       \
  X(array_params) /* ArrayParams */                                                  \
  /* Of a decode step on CUDA: how many blocks that share rows are done, scratch. */ \
  X(arrivals)                                                                        \
  /* Of float32 on Hopper: see float_parts.h, scratch. */                            \
  X(key_parts)                                                                       \
  X(value_parts)                                                                     \
  X(query_parts)                                                                     \
  X(dout_parts)                                                                      \
  /* Of a launch that finds the block map of a mask, of which array_params tells. */ \
  X(mask)                                                                            \
  X(found_blocks)

#define FLASHATTN_ENUMERATOR(name, ...) name,
enum class Binding { FLASHATTN_INPUTS(FLASHATTN_ENUMERATOR) FLASHATTN_FURTHER_BINDINGS(FLASHATTN_ENUMERATOR) count };
#undef FLASHATTN_ENUMERATOR

constexpr int kNumBindings = static_cast<int>(Binding::count);

constexpr int index(Binding binding) {
  return static_cast<int>(binding);
}
constexpr Binding binding_of(Input input) {
  return static_cast<Binding>(flashattn::index(input));
}
std::string_view name(Binding binding);

// What a launch does with an argument. Arrays are read or written; structs are passed by value.
enum class Role { input, output, value };

struct Argument {
  Binding binding;
  Role role;

  bool operator==(const Argument&) const = default;
};

// A number by its name, for which a kernel is compiled. A flag removes the code for what a call does not have.
struct Constant {
  std::string_view name;
  std::variant<bool, int32_t> value;

  bool operator==(const Constant&) const = default;
};

using Size = std::array<uint32_t, 3>;

// An array of 16-bit numbers that the tensor memory accelerator copies in boxes of 64 columns and `rows` rows.
struct Boxes {
  Binding array;
  int rows;
  std::array<int64_t, 4> sizes;  // columns, rows, heads and batch elements
  std::array<int64_t, 3> steps;  // from a row, head and batch element to the next, in elements
};

struct Launch {
  std::string source;                // the kernel's file, without its ending: "decode_split"
  std::string function;              // the name of the instantiation: "metal_decode_split_half_64_64_8"
  std::string instantiation;         // its template arguments: "decode_split<half, Sizes>"
  std::vector<Constant> sizes = {};  // the fields of Sizes: {"dim", 64}, {"value_dim", 64}, {"rows", 8}
  std::vector<Constant> constants;
  std::string specialisation;  // the name, with the constants' values: what a compiled kernel is known by
  std::vector<Argument> arguments;
  Size grid;         // in threadgroups
  Size threadgroup;  // in threads
  // On CUDA: bytes of shared memory beside the kernel's own, and how many blocks a multiprocessor is to run at once.
  uint32_t dynamic_shared = 0;
  int blocks_at_once = 1;
  bool with_next = false;  // on CUDA: the next launch may start before this one ends; both wait for the one before them
  // On CUDA, what the tensor memory accelerator copies: keys, values, queries and dout, in this order. Later ones may
  // be missing.
  std::vector<Boxes> boxes = {};
};

// Memory that launches write and read, of 32-bit numbers, alive until the last of them is done.
struct Scratch {
  Binding binding;
  int64_t elements;
};

// The launches of one call, in order. A launch waits for those before it whose outputs are its inputs.
struct Launches {
  std::vector<Launch> launches = {};
  std::vector<Scratch> scratch = {};
  // What arguments with Role::value are.
  AttentionParams params = {};
  SplitParams split = {};
  BackwardParams backward = {};
  ArrayParams array = {};
};

// The bytes of an argument with Role::value.
std::span<const std::byte> value_of(const Launches& launches, Binding binding);

// The properties of an NVIDIA GPU by which kernels and launches are chosen. Without a GPU the last two are an H100's.
struct Device {
  int compute_capability = 0;  // 90 for 9.0; 0: none is there
  int multiprocessors = 132;
  int shared_memory = 227 * 1024;  // bytes that a block can have
};

// Everything about a call that the choice of launches depends on.
struct Call {
  AttentionParams params;
  Dtype dtype;                                  // of query and out, and of key and value if they are not quantised
  Dtype bias_dtype = Dtype::float32;            // of bias
  Dtype sinks_dtype = Dtype::float32;           // of sinks
  Dtype group_dtype = Dtype::float32;           // of scales and biases
  std::array<bool, kNumBindings> present = {};  // the arrays that the call has
  std::array<bool, kNumBindings> aligned = {};  // those that begin at a multiple of 16 bytes
  Device device = {};
  int tiling = 0;  // of the kernel
  Precision precision = Precision::float32;

  bool has(Binding binding) const { return present[index(binding)]; }
};

}  // namespace flashattn::gpu
