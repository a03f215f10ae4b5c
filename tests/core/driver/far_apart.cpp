// Runs cases whose arrays' rows are so far apart in memory that 32 bits cannot count the elements between them. The
// address space is reserved, but only the rows are touched. Results must equal, bit for bit, those of compact arrays.
//
//   far_apart CASES
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "passes.h"

using namespace flashattn;
using namespace flashattn::driver;

namespace {

constexpr int64_t kApart = int64_t{1} << 32;  // elements from the first row to one past the last row
const Sizes kSmall = {{{}, {2}, {2, 3}}, {1, 2}, {1, 3}, {1, 5, 9, 65}, {1, 33, 97, 700}, {1, 7, 64, 80}, 1 << 18};

// Copies an array to far-apart rows in row-major order. Broadcast dimensions stay broadcast.
class FarRows {
 public:
  FarRows(const Case& c, const void* near, const Strides& strides, int heads, int rows, int columns, int64_t bytes)
      : strides_(strides), row_bytes_(bytes * (strides.column == 0 ? 1 : columns)) {
    struct Dimension {
      int extent;
      int64_t* stride;
    };
    std::vector<Dimension> dimensions;
    for (size_t b = 0; b < c.batch.size(); ++b) dimensions.push_back({c.batch[b], &strides_.batch[b]});
    dimensions.push_back({heads, &strides_.head});
    dimensions.push_back({rows, &strides_.row});
    int64_t count = 1;
    for (Dimension d : dimensions) count *= *d.stride == 0 ? 1 : d.extent;
    size_ = size_t((kApart + kMargin) * bytes + row_bytes_);
    int64_t stride = kApart / count;
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (mapped == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
#ifdef MADV_NOHUGEPAGE  // Linux: a huge page of 2 MB for each row would exhaust the memory
    madvise(mapped, size_, MADV_NOHUGEPAGE);
#endif
    first_ = static_cast<char*>(mapped);
    places_ = {{static_cast<const char*>(near), first_}};
    for (size_t d = dimensions.size(); d-- > 0;) {
      if (*dimensions[d].stride == 0) continue;
      size_t inner = places_.size();
      for (int i = 1; i < dimensions[d].extent; ++i) {
        for (size_t k = 0; k < inner; ++k) {
          places_.push_back({places_[k].near + i * *dimensions[d].stride * bytes, places_[k].far + i * stride * bytes});
        }
      }
      *dimensions[d].stride = stride;
      stride *= dimensions[d].extent;
    }
    for (const Place& place : places_) std::memcpy(place.far, place.near, size_t(row_bytes_));
  }
  FarRows(const FarRows&) = delete;
  ~FarRows() { munmap(first_, size_); }

  char* first() const { return first_; }
  const Strides& strides() const { return strides_; }

  void overwrite() {
    for (const Place& place : places_) std::memset(place.far, 0xff, size_t(row_bytes_));
  }
  bool same() const {
    bool same = true;
    for (const Place& place : places_) same = same && std::memcmp(place.far, place.near, size_t(row_bytes_)) == 0;
    return same;
  }

 private:
  static constexpr int64_t kMargin = 64;  // in elements, behind the last row: at least the widest vector

  struct Place {
    const char* near;
    char* far;
  };
  Strides strides_;
  int64_t row_bytes_;
  char* first_;
  size_t size_;
  std::vector<Place> places_;
};

bool same_bits(const Case& c, const Inputs& in, Draw& draw) {
  Call call(c, in, draw);
  call.run();
  std::deque<FarRows> moved;
  const auto move = [&]<typename T>(T*& first, Strides& strides, int heads, int rows, int columns, int64_t bytes) {
    if (!first) return;
    const FarRows& far = moved.emplace_back(c, first, strides, heads, rows, columns, bytes);
    first = reinterpret_cast<T*>(static_cast<void*>(far.first()));
    strides = far.strides();
  };
  cpu::AttentionArgs args = call.args;
  AttentionParams& p = args.params;
  int64_t bytes = size_of(c.dtype), key_bytes = c.bits > 0 ? 4 : bytes;
  int key_columns = c.bits > 0 ? c.head_dim * c.bits / 32 : c.head_dim;
  int value_columns = c.bits > 0 ? c.value_dim * c.bits / 32 : c.value_dim;
  move(args.out, p.out, c.heads(), c.query_len, c.value_dim, bytes);
  move(args.lse, p.lse, c.heads(), c.query_len, 1, 4);
  move(args.row_stats, p.row_stats, c.heads(), c.query_len, 2, 4);
  FarRows &out = moved[0], &lse = moved[1], &row_stats = moved[2];
  move(args.query, p.query, c.heads(), c.query_len, c.head_dim, bytes);
  move(args.key, p.key, c.kv_heads, c.key_len, key_columns, key_bytes);
  move(args.value, p.value, c.kv_heads, c.key_len, value_columns, key_bytes);
  move(args.visible, p.visible, c.heads(), c.query_len, c.key_len, 1);
  move(args.bias, p.bias, c.heads(), c.query_len, c.key_len, size_of(c.bias_dtype));
  move(args.tree, p.tree, 1, c.tree_size, (c.tree_size + 31) / 32, 4);
  move(args.key_start, p.key_start, 1, 1, 1, 4);
  move(args.key_stop, p.key_stop, 1, 1, 1, 4);
  move(args.sinks, p.sinks, c.heads(), 1, 1, 4);
  move(args.alibi_slopes, p.alibi_slopes, c.heads(), 1, 1, 4);
  if (c.bits > 0) {
    int64_t group_bytes = size_of(c.group_dtype);
    move(args.key_scales, p.key_scales, c.kv_heads, c.key_len, c.head_dim / c.group_size, group_bytes);
    move(args.key_biases, p.key_biases, c.kv_heads, c.key_len, c.head_dim / c.group_size, group_bytes);
    move(args.value_scales, p.value_scales, c.kv_heads, c.key_len, c.value_dim / c.group_size, group_bytes);
    move(args.value_biases, p.value_biases, c.kv_heads, c.key_len, c.value_dim / c.group_size, group_bytes);
  }
  out.overwrite();
  lse.overwrite();
  row_stats.overwrite();
  cpu::check(args);
  c.decode ? cpu::decode(args) : cpu::prefill(args);
  bool same = out.same() && lse.same() && row_stats.same();
  if (c.bits > 0) return same;  // quantised keys and values have no gradient

  GradientCall near(c, call, draw_cotangents(c, draw));
  near.run();
  std::vector<std::vector<double>> expected, found;
  for (Result* result : near.results()) expected.push_back(result->numbers());
  cpu::BackwardArgs gradient = near.args;
  gradient.forward = args;
  move(gradient.out_gradient, gradient.out_gradient_strides, c.heads(), c.query_len, c.value_dim, bytes);
  move(gradient.lse_gradient, gradient.lse_gradient_strides, c.heads(), c.query_len, 1, 4);
  for (Result* result : near.results()) result->overwrite();
  cpu::check(gradient);
  cpu::backward(gradient);
  for (Result* result : near.results()) found.push_back(result->numbers());
  for (size_t i = 0; i < found.size(); ++i) {
    size_t size = found[i].size() * sizeof(double);
    same = same && (size == 0 || std::memcmp(found[i].data(), expected[i].data(), size) == 0);  // NaN equals NaN
  }
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  int cases = argc > 1 ? std::atoi(argv[1]) : 0;
  for (int number = 0; number < cases; ++number) {
    Draw draw = {std::mt19937(unsigned(number))};
    Case c = draw_case(draw, number, number % 4 == 3, kSmall);
    c.strided = false;
    Inputs in = draw_inputs(c, draw);
    if (!same_bits(c, in, draw)) {
      std::printf("%s: other bits\n", c.describe().c_str());
      return 1;
    }
  }
  std::printf("%d cases, the same bits\n", cases);
  return 0;
}
