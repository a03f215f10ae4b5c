// Runs a kernel while the memory of every key, value and mask element that no query sees is inaccessible:
// touching it ends the program with a segmentation fault.
//
//   hidden_memory KERNEL QUERY_LEN KEY_LEN CAUSAL WINDOW START STOP FIRST_OPEN_KEY LAST_OPEN_KEY
//
// KERNEL: decode, prefill, or block (the first 64 queries only). Keys from FIRST_OPEN_KEY to LAST_OPEN_KEY,
// rounded out to whole pages, can be read; all others cannot. Prints the sum of the outputs.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "forward.h"
#include "kernels.h"

using namespace flashattn;

namespace {

constexpr int kDim = 16;  // one page of 4096 bytes holds 64 keys

struct Guarded {
  char* memory;
  size_t bytes;

  explicit Guarded(size_t size) : bytes(size) {
    memory = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
  }
  // Leaves [begin, end), rounded out to pages, readable.
  void close_but(size_t begin, size_t end) {
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    begin = begin / page * page;
    end = (end + page - 1) / page * page;
    mprotect(memory, begin, PROT_NONE);
    if (end < bytes) {
      mprotect(memory + end, bytes - end, PROT_NONE);
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 10) {
    std::fprintf(stderr, "expected 9 arguments, found %d\n", argc - 1);
    return 2;
  }
  int number[10];
  for (int i = 2; i < 10; ++i) number[i] = std::atoi(argv[i]);
  int query_len = number[2], key_len = number[3];
  int32_t start = number[6], stop = number[7];
  size_t open_begin = static_cast<size_t>(number[8]), open_end = static_cast<size_t>(number[9]);

  Guarded key{size_t(key_len) * kDim * sizeof(float)}, value{key.bytes}, visible{size_t(key_len)};
  for (int i = 0; i < key_len * kDim; ++i) {
    reinterpret_cast<float*>(key.memory)[i] = float(i % 7) * 0.1f;
    reinterpret_cast<float*>(value.memory)[i] = float(i % 5) * 0.1f;
  }
  std::memset(visible.memory, 1, visible.bytes);
  constexpr size_t kRow = kDim * sizeof(float);
  key.close_but(open_begin * kRow, open_end * kRow);
  value.close_but(open_begin * kRow, open_end * kRow);
  visible.close_but(open_begin, open_end);

  std::vector<float> query(size_t(query_len) * kDim, 0.5f), out(query.size(), 0), lse(size_t(query_len), 0);
  std::vector<float> row_stats(2 * lse.size(), 0);
  cpu::AttentionArgs args = {};
  AttentionParams& p = args.params;
  p.batch_size = 1;
  p.num_heads = p.num_kv_heads = 1;
  p.query_len = query_len;
  p.key_len = key_len;
  p.head_dim = p.value_dim = kDim;
  p.scale = 0.25f;
  p.causal = number[4] != 0;
  p.window = number[5];
  p.query.row = p.key.row = p.value.row = p.out.row = kDim;
  p.query.column = p.key.column = p.value.column = p.out.column = p.lse.row = p.visible.column = 1;
  p.row_stats.row = 2, p.row_stats.column = 1;
  args.query = query.data();
  args.key = key.memory;
  args.value = value.memory;
  args.out = out.data();
  args.lse = lse.data();
  args.row_stats = row_stats.data();
  args.visible = reinterpret_cast<const bool*>(visible.memory);
  args.key_start = &start;
  args.key_stop = &stop;

  if (std::strcmp(argv[1], "decode") == 0) {
    cpu::decode(args);
  } else if (std::strcmp(argv[1], "prefill") == 0) {
    cpu::prefill(args);
  } else {
    cpu::RowBlock block = {};
    block.head_count = 1;
    block.query_count = 64;
    block.key_end = key_len;
    cpu::kernels().attend(args, block);
  }
  double sum = 0;
  for (float x : out) sum += double(x);
  std::printf("%g\n", sum);
  return 0;
}
