// Replaces MLX's header of this name. The classes here need no GPU, and print their calls. The build for macOS uses
// MLX's own header. Only that build checks that MLX's classes have the functions that the Metal backend calls.
#pragma once

#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "mlx/array.h"
#include "mlx/device.h"
#include "mlx/stream.h"

namespace NS {
using UInteger = uint64_t;
enum StringEncoding { UTF8StringEncoding };
struct String {
  static String* string(const char*, StringEncoding) { return nullptr; }
};
}  // namespace NS

namespace MTL {
enum DataType { DataTypeBool, DataTypeInt };
struct Size {
  Size(NS::UInteger x, NS::UInteger y, NS::UInteger z) : width(x), height(y), depth(z) {}
  NS::UInteger width, height, depth;
};
struct Library {
  std::string name;
};
struct ComputePipelineState {
  std::string name;
  static inline NS::UInteger limit = 1024;
  NS::UInteger maxTotalThreadsPerThreadgroup() const { return limit; }
};
struct CommandQueue {};
struct CommandBuffer {};
}  // namespace MTL

namespace mlx::core::metal {

using MTLFCList = std::vector<std::tuple<const void*, MTL::DataType, NS::UInteger>>;

class Device {
 public:
  MTL::Library* get_library(const std::string& name, const std::function<std::string()>& source) {
    auto [library, is_new] = libraries_.try_emplace(name, MTL::Library{name});
    if (is_new) {
      std::cout << "compile " << name << " " << source().size() << "\n";
    }
    return &library->second;
  }

  MTL::ComputePipelineState* get_kernel(const std::string& function, MTL::Library* library, const std::string& name,
                                        const MTLFCList& constants) {
    auto [pipeline, is_new] = pipelines_.try_emplace(name, MTL::ComputePipelineState{name});
    if (is_new) {
      std::cout << "specialise " << function << " of " << library->name << " as " << name << "\n";
      for (auto [value, type, index] : constants) {
        std::cout << "constant " << index << " "
                  << (type == MTL::DataTypeBool ? *static_cast<const bool*>(value)
                                                : *static_cast<const int32_t*>(value))
                  << "\n";
      }
    }
    return &pipeline->second;
  }

 private:
  std::map<std::string, MTL::Library> libraries_;
  std::map<std::string, MTL::ComputePipelineState> pipelines_;
};

class CommandEncoder {
 public:
  void set_compute_pipeline_state(MTL::ComputePipelineState* kernel) { std::cout << "use " << kernel->name << "\n"; }

  void set_input_array(const array& a, int index) {
    std::cout << "input " << index << " buffer " << id(a) << " offset " << a.offset() << "\n";
    wait_for(a);
  }

  void set_output_array(array& a, int index) {
    std::cout << "output " << index << " buffer " << id(a) << " bytes " << a.nbytes() << "\n";
    wait_for(a);
    writes_.insert(id(a));
  }

  template <typename T>
  void set_bytes(const T*, int count, int index) {
    std::cout << "bytes " << index << " " << count * sizeof(T) << "\n";
  }

  void add_temporary(array a) {
    std::cout << "keep buffer " << id(a) << "\n";
    kept_.push_back(std::move(a));
  }

  // As in MLX, there is a barrier before a launch if it uses an array that was written since the last barrier.
  void dispatch_threadgroups(MTL::Size grid, MTL::Size group) {
    std::cout << (barrier_ ? "barrier\n" : "") << "dispatch " << grid.width << " " << grid.height << " " << grid.depth
              << " of " << group.width << " " << group.height << " " << group.depth << "\n";
    if (barrier_) {
      written_.clear();
    }
    written_.merge(writes_);
    writes_.clear();
    barrier_ = false;
  }

 private:
  void wait_for(const array& a) { barrier_ |= written_.count(id(a)) > 0; }
  int id(const array& a) { return ids_.try_emplace(a.buffer().ptr(), static_cast<int>(ids_.size())).first->second; }

  std::map<const void*, int> ids_;
  std::set<int> writes_, written_;
  std::vector<array> kept_;
  bool barrier_ = false;
};

inline Device& device(mlx::core::Device) {
  static Device device;
  return device;
}

inline CommandEncoder& get_command_encoder(Stream) {
  static CommandEncoder encoder;
  return encoder;
}

}  // namespace mlx::core::metal
