// Runs a kernel that must not read keys, values and mask elements that no query sees. Reading their memory ends the
// program with a segmentation fault.
//
//   hidden_memory KERNEL QUERY_LEN KEY_LEN CAUSAL WINDOW START STOP FIRST_OPEN_KEY LAST_OPEN_KEY
//
// KERNEL: decode, prefill, or block (only the first 64 queries). A key range hides all keys outside [START, STOP). For
// array_decode and array_prefill, a bool array hides these keys instead, and array_prefill also gets the array's block
// map. Only pages with keys in [FIRST_OPEN_KEY, LAST_OPEN_KEY) can be read. Prints the sum of the outputs.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "block_map.h"
#include "call.h"
#include "kernels.h"

using namespace flashattn;
using namespace flashattn::driver;

namespace {

constexpr int kDim = 16;  // one page of 4096 bytes holds 64 keys

// Replaces an array by a copy of which only bytes [begin, end), rounded out to whole pages, can be accessed.
template <typename T>
void close_but(const T*& array, size_t size, size_t begin, size_t end) {
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  char* memory = static_cast<char*>(mapped);
  std::memcpy(memory, array, size);
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  end = (end + page - 1) / page * page;
  mprotect(memory, begin / page * page, PROT_NONE);
  if (end < size) mprotect(memory + end, size - end, PROT_NONE);
  array = reinterpret_cast<const T*>(memory);
}

}  // namespace

int main(int, char** argv) {
  std::string kernel = argv[1];
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  Case c = {};
  bool in_array = kernel.starts_with("array_");
  c.decode = kernel.ends_with("decode");
  c.kv_heads = c.group = 1;
  c.query_len = number(2), c.key_len = number(3);
  c.causal = number(4) != 0;
  c.window = number(5);
  c.head_dim = c.value_dim = kDim;
  c.query_size = 1;
  c.visible = c.key_range = true;
  Draw draw{std::mt19937(0)};
  Inputs in = draw_inputs(c, draw);
  in.visible = Tensor({}, 1, 1, c.key_len, kRowMajor);
  std::fill(in.visible.numbers.begin(), in.visible.numbers.end(), 1);
  if (in_array) {
    for (int j = 0; j < c.key_len; ++j) in.visible.numbers[size_t(j)] = number(6) <= j && j < number(7);
  }
  in.key_start.numbers = {in_array ? 0.0 : double(number(6))};
  in.key_stop.numbers = {double(in_array ? c.key_len : number(7))};

  CpuCall call(c, in, draw);
  int rows = c.query_len;
  size_t begin = static_cast<size_t>(number(8)), end = static_cast<size_t>(number(9));
  size_t keys = static_cast<size_t>(c.key_len), row = kDim * sizeof(float);
  close_but(call.args.key, keys * row, begin * row, end * row);
  close_but(call.args.value, keys * row, begin * row, end * row);
  std::vector<uint8_t> map((keys + kBlockSize - 1) / kBlockSize);
  if (kernel == "array_prefill") {
    ArrayParams mask = {.count = 0, .ndim = 2, .shape = {1, c.key_len}, .strides = {0, 1}};
    cpu::find_block_map(call.args.visible, cpu::MaskType::boolean, mask, map.data());
    call.args.block_map = map.data();
    call.args.params.block_map = {.column = 1, .row = 0, .head = 0, .batch = {}};
  }
  if (kernel != "array_decode") {  // array_decode reads the whole array
    close_but(call.args.visible, keys, begin, end);
  }
  if (kernel == "block") {
    cpu::RowBlock block = {};
    block.head_count = 1;
    block.query_count = rows = 64;
    block.key_end = c.key_len;
    cpu::kernels().attend(call.args, block);
  } else {
    call.run();
  }
  double sum = 0;
  std::vector<double> out = call.out.numbers();
  for (int i = 0; i < rows * kDim; ++i) sum += out[size_t(i)];
  std::printf("%g\n", sum);
  return 0;
}
