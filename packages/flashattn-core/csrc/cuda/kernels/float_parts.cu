// Keys and values in float32 as sums of bfloat16, in the order of their rows, so that boxes can be made of them.
#include "float_parts.h"

#include "kernel.h"

using namespace flashattn;

// D, DV: head_dim and value_dim rounded up to 16 bytes. Threads: 16 bytes of each part of a key, or of a value.
template <typename T, int D, int DV>
FLASHATTN_KERNEL float_parts(const cuda::Arguments& arguments) {
  FLASHATTN_INPUT_ARGUMENTS(T, T);
  FLASHATTN_WRITTEN(uint4, key_parts);
  FLASHATTN_WRITTEN(uint4, value_parts);
  constexpr int kOfKey = D / 8, kOfRow = kOfKey + DV / 8;
  int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, number = thread / kOfRow;
  int piece = int(thread % kOfRow), row = int(number % params.key_len);
  int head = int(number / params.key_len % params.num_kv_heads);
  int batch = int(number / params.key_len / params.num_kv_heads);
  if (batch >= params.batch_size) return;
  bool of_key = piece < kOfKey;
  if (!of_key) piece -= kOfKey;
  auto stored = FLASHATTN_STORED_INPUTS(T);
  auto rows = of_key ? keys_of(stored, params, batch, head) : values_of(stored, params, batch, head);
  EightInParts eight(rows, row, piece * 8, of_key ? head_dim : value_dim, true);
  uint4* to = of_key ? key_parts : value_parts;
  FLASHATTN_UNROLL
  for (int part = 0; part < Operand<T>::kParts; ++part) {
    int64_t tile = (int64_t(batch) * Operand<T>::kParts + part) * params.num_kv_heads + head;
    to[(tile * params.key_len + row) * (of_key ? kOfKey : kOfRow - kOfKey) + piece] = eight.parts[part];
  }
}
