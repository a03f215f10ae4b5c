// Runs cases whose rows are so far apart in memory that their offsets, in elements, overflow int32. The program
// reserves the address space, but uses only the rows. Results must equal those of compact arrays, bit for bit.
//
//   far_apart CASES
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "arrays.h"
#include "passes.h"

using namespace flashattn;
using namespace flashattn::driver;

namespace {

constexpr int64_t kApart = int64_t{1} << 32;  // each array spans this many elements
const Sizes kSmall = {{{}, {2}, {2, 3}}, {1, 2}, {1, 3}, {1, 5, 9, 65}, {1, 33, 97, 700}, {1, 7, 64, 80}, 1 << 18};

// Copies an array to far-apart rows in row-major order. Broadcast dimensions stay broadcast.
class FarRows {
 public:
  FarRows(const Case& c, const cpu::Array& near, int64_t bytes)
      : strides_(near.strides), row_bytes_(bytes * (near.strides.column == 0 ? 1 : near.columns)) {
    struct Dimension {
      int64_t extent;
      int64_t* stride;
    };
    std::vector<Dimension> dimensions;
    for (size_t b = 0; b < c.batch.size(); ++b) dimensions.push_back({c.batch[b], &strides_.batch[b]});
    dimensions.push_back({near.heads, &strides_.head});
    dimensions.push_back({near.rows, &strides_.row});
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
    places_ = {{static_cast<const char*>(near.data), first_}};
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
  static constexpr int64_t kMargin = 64;  // unused elements after the last row; no SIMD vector has more

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
  CpuCall call(c, in, draw, c.bits == 0);
  call.run();
  std::deque<FarRows> moved;
  const auto move = [&]<typename T>(const cpu::Array& near, T*& first, Strides& strides) {
    if (!first) return;
    const FarRows& far = moved.emplace_back(c, near, near.element_size(call.args));
    first = reinterpret_cast<T*>(static_cast<void*>(far.first()));
    strides = far.strides();
  };
  cpu::AttentionArgs args = call.args;
  cpu::for_each_output(args, move);
  size_t outputs = moved.size();
  cpu::for_each_input(args, move);
  for (size_t i = 0; i < outputs; ++i) moved[i].overwrite();
  c.decode ? cpu::decode(args) : cpu::prefill(args);
  bool same = std::all_of(moved.begin(), moved.begin() + outputs, [](const FarRows& output) { return output.same(); });
  if (c.bits > 0) return same;  // quantised keys and values have no gradient

  GradientCall near(c, call, draw_cotangents(c, draw));
  near.run();
  std::vector<std::vector<double>> expected, found;
  for (Result* result : near.results()) expected.push_back(result->numbers());
  cpu::BackwardArgs gradient = near.args;
  gradient.forward = args;
  gradient.exact_out = c.dtype == Dtype::float32 ? static_cast<const float*>(args.out) : args.exact_out;
  cpu::for_each_cotangent(gradient, move);
  for (Result* result : near.results()) result->overwrite();
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
