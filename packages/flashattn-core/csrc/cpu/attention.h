// The CPU backend's front door: raw pointers, shapes and strides in, finished output out. Knows nothing
// of MLX, so it can be built, fuzzed and sanitised alone.
#pragma once

#include <cstdint>
#include <string>

#include "../params.h"

namespace flashattn::cpu {

class Cancellation;

enum class Dtype : uint8_t { float32, float16, bfloat16 };

constexpr int64_t size_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : 2;
}

struct AttentionArgs {
  AttentionParams params;
  Dtype dtype;       // of query, key, value and out; keys and values may be quantised instead
  Dtype bias_dtype;  // of bias

  const void* query;
  const void* key;
  const void* value;
  void* out;
  float* lse;

  // Optional inputs, null when absent.
  const bool* visible;        // true: query sees key
  const void* bias;           // added to the scores; -inf hides
  const int32_t* key_start;   // first visible key
  const int32_t* key_stop;    // one past the last visible key
  const uint32_t* tree;       // bit j of row t: tree node t sees tree node j
  const float* sinks;         // one extra logit a head
  const float* alibi_slopes;  // score -= slope * distance

  // Of quantised keys and values, which are uint32 words then.
  QuantParams quant;
  Dtype group_dtype;
  const void *key_scales, *key_biases, *value_scales, *value_biases;

  const Cancellation* cancellation = nullptr;  // outlives the call; null: it runs to its end
};

// Queries up to this length take the decode kernel: few rows, the work is split over the keys.
constexpr int kMaxDecodeLen = 8;

// Both compute the same function; they differ in how the work is cut. Safe to call from several threads. A cancelled
// call leaves NaN in out and lse.
void prefill(const AttentionArgs& args);
void decode(const AttentionArgs& args);

// Reads FLASHATTN_CPU_ISA and FLASHATTN_NUM_THREADS, once. Throws std::invalid_argument, naming the variable,
// when one of them holds something that this machine cannot do.
void initialise();

// "AVX2, 2 threads". Initialises.
std::string describe();

}  // namespace flashattn::cpu
