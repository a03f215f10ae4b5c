// Runs cases whose rows are so far apart in memory that their offsets, in elements, overflow int32. The program
// reserves the address space, but uses only the rows. Results must equal those of compact arrays, bit for bit.
//
//   far_apart CASES
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "passes.h"

using namespace flashattn;
using namespace flashattn::driver;

namespace {

constexpr int64_t kApart = int64_t{1} << 32;  // each array spans this many elements
const Sizes kSmall = {{{}, {2}, {2, 3}}, {1, 2}, {1, 3}, {1, 5, 9, 65}, {1, 33, 97, 700}, {1, 7, 64, 80}, 1 << 18};

// Moves the rows of arrays in row-major order far apart.
class FarRows {
 public:
  ~FarRows() {
    for (const Moved& array : moved_) munmap(array.far, array.size);
  }

  // Moves an array of this many elements.
  template <typename T>
  void move(T*& first, Strides& strides, size_t elements, int columns, size_t bytes) {
    if (!first || elements == 0) return;
    if (strides.column == 0) columns = 1;
    int64_t rows = int64_t(elements) / columns, apart = kApart / rows;
    Moved array = {nullptr,
                   reinterpret_cast<const char*>(first),
                   size_t(kApart + columns) * bytes,
                   rows,
                   apart * int64_t(bytes),
                   size_t(columns) * bytes};
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapped = mmap(nullptr, array.size, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (mapped == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
#ifdef MADV_NOHUGEPAGE  // Linux: a huge page of 2 MB for each row would exhaust the memory
    madvise(mapped, array.size, MADV_NOHUGEPAGE);
#endif
    array.far = static_cast<char*>(mapped);
    first = static_cast<T*>(mapped);
    strides.row = strides.row / columns * apart, strides.head = strides.head / columns * apart;
    for (int64_t& stride : strides.batch) stride = stride / columns * apart;
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(array.row(i), array.near + size_t(i) * array.row_bytes, array.row_bytes);
    moved_.push_back(array);
  }

  void overwrite() {
    for (const Moved& array : moved_) {
      for (int64_t i = 0; i < array.rows; ++i) std::memset(array.row(i), 0xff, array.row_bytes);
    }
  }
  bool same() const {
    bool same = true;
    for (const Moved& array : moved_) {
      for (int64_t i = 0; i < array.rows; ++i) {
        same = same && std::memcmp(array.row(i), array.near + size_t(i) * array.row_bytes, array.row_bytes) == 0;
      }
    }
    return same;
  }

 private:
  struct Moved {
    char* far;
    const char* near;
    size_t size;
    int64_t rows, apart;  // `apart` is in bytes
    size_t row_bytes;
    char* row(int64_t i) const { return far + i * apart; }
  };
  std::vector<Moved> moved_;
};

void move_inputs(const Case& c, const Inputs& in, cpu::AttentionArgs& args, FarRows& far) {
  AttentionParams& p = args.params;
  size_t bytes = format(c.dtype).bytes, of_groups = format(c.group_dtype).bytes;
  far.move(args.query, p.query, in.query.numbers.size(), c.head_dim, bytes);
  if (c.bits == 0) {
    far.move(args.key, p.key, in.key.numbers.size(), c.head_dim, bytes);
    far.move(args.value, p.value, in.value.numbers.size(), c.value_dim, bytes);
  } else {
    const Quantised &key = in.quantised[0], &value = in.quantised[1];
    far.move(args.key, p.key, key.words.numbers.size(), c.head_dim * c.bits / 32, 4);
    far.move(args.value, p.value, value.words.numbers.size(), c.value_dim * c.bits / 32, 4);
    far.move(args.key_scales, p.key_scales, key.scales.numbers.size(), c.head_dim / c.group_size, of_groups);
    far.move(args.key_biases, p.key_biases, key.biases.numbers.size(), c.head_dim / c.group_size, of_groups);
    far.move(args.value_scales, p.value_scales, value.scales.numbers.size(), c.value_dim / c.group_size, of_groups);
    far.move(args.value_biases, p.value_biases, value.biases.numbers.size(), c.value_dim / c.group_size, of_groups);
  }
  far.move(args.visible, p.visible, in.visible.numbers.size(), c.key_len, 1);
  far.move(args.bias, p.bias, in.bias.numbers.size(), c.key_len, format(c.bias_dtype).bytes);
}

bool same_bits(const Case& c, const Inputs& in, Draw& draw) {
  CpuCall call(c, in, draw, c.bits == 0);
  call.run();
  FarRows inputs, outputs;
  cpu::AttentionArgs args = call.args;
  size_t rows = size_t(c.rows()), out = rows * size_t(c.value_dim);
  move_inputs(c, in, args, inputs);
  outputs.move(args.out, args.params.out, out, c.value_dim, format(c.dtype).bytes);
  if (args.exact_out) {
    Strides strides = call.args.params.out;  // exact_out has the strides of out
    outputs.move(args.exact_out, strides, out, c.value_dim, 4);
  }
  outputs.move(args.lse, args.params.lse, rows, 1, 4);
  outputs.overwrite();
  c.decode ? cpu::decode(args) : cpu::prefill(args);
  if (c.bits > 0) return outputs.same();  // quantised keys and values have no gradient

  GradientCall near(c, call, draw_cotangents(c, draw));
  near.run();
  std::vector<std::vector<double>> expected, found;
  for (Result* result : near.results()) expected.push_back(result->numbers());
  cpu::BackwardArgs gradient = near.args;
  gradient.forward = args;
  gradient.exact_out = c.dtype == Dtype::float32 ? static_cast<const float*>(args.out) : args.exact_out;
  const Cotangents& back = near.cotangents;
  inputs.move(gradient.out_gradient, gradient.out_gradient_strides, back.out.numbers.size(), c.value_dim,
              format(c.dtype).bytes);
  for (Result* result : near.results()) result->overwrite();
  cpu::backward(gradient);
  for (Result* result : near.results()) found.push_back(result->numbers());
  bool same = outputs.same();
  for (size_t i = 0; i < found.size(); ++i) {
    size_t size = found[i].size() * sizeof(double);
    same = same && (size == 0 || std::memcmp(found[i].data(), expected[i].data(), size) == 0);  // NaN equals NaN
  }
  return same;
}

}  // namespace

int main(int, char** argv) {
  int cases = std::atoi(argv[1]);
  for (int number = 0; number < cases; ++number) {
    Draw draw = {std::mt19937(unsigned(number))};
    Case c = draw_case(draw, number % 4 == 3, kSmall);
    c.strided = false;
    Inputs in = draw_inputs(c, draw);
    if (!same_bits(c, in, draw)) {
      std::printf("case %d: other bits\n", number);
      return 1;
    }
  }
  std::printf("%d cases, the same bits\n", cases);
  return 0;
}
