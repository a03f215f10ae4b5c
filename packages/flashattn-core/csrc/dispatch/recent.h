// A cache of the last few values. A few are enough, because the layers of a model make only a few different calls. The
// cache has no lock, so each thread needs its own, or the caller must hold a mutex.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <utility>

namespace flashattn {

template <typename T>
struct Recent {
  std::array<std::optional<T>, 8> made;
  size_t next = 0;

  template <typename F>
  T* find(F is_wanted) {
    for (std::optional<T>& one : made) {
      if (one && is_wanted(*one)) return &*one;
    }
    return nullptr;
  }
  void keep(T one) { made[next++ % made.size()] = std::move(one); }
};

}  // namespace flashattn
