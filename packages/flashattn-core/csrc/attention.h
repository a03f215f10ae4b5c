// The op and its primitive. The op checks arguments and builds lazy arrays; the primitive evaluates them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "metal/encode.h"
#include "mlx/array.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace flashattn {

namespace mx = mlx::core;

// No kernel covers the call; what() is the reason that plan() gives.
struct NoKernelError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The optional inputs, in the order in which the primitive has them behind query, key and value.
enum Input { kKeyStart, kKeyStop, kTree, kVisible, kBias, kSinks, kAlibiSlopes, kNumOptionalInputs };

using OptionalInputs = std::array<std::optional<mx::array>, kNumOptionalInputs>;

struct Options {
  std::optional<float> scale;  // none: 1 / sqrt(D)
  float softcap;               // 0: none
  bool causal;
  int window;          // 0: none
  std::string kernel;  // "auto", or a kernel's name

  bool operator==(const Options&) const = default;
};

// {out, lse}. Shapes, dtypes and meanings: flash_attention() in Python.
// Throws std::invalid_argument for bad arguments, NoKernelError where no kernel covers them.
std::vector<mx::array> attention(const mx::array& query, const mx::array& key, const mx::array& value,
                                 const OptionalInputs& optional_inputs, const Options& options,
                                 mx::StreamOrDevice stream = {});

// The kernel that attention() would run on `backend` for these arguments. Checks them the same way.
Choice plan(const mx::array& query, const mx::array& key, const mx::array& value, const OptionalInputs& optional_inputs,
            const Options& options, Backend backend);

// What eval_gpu would hand to Metal for these arguments, with the inputs evaluated and the outputs not allocated.
// For tests, which run the launches where there is no GPU. Throws as attention() does.
metal::Work metal_work(const mx::array& query, const mx::array& key, const mx::array& value,
                       const OptionalInputs& optional_inputs, const Options& options);

// The same for the gradients of query, key and value: `out` and `lse` are what attention() gave, `dout` and `dlse` the
// gradients of those, no `dlse` meaning zeros. Throws NoKernelError where the backward kernels do not cover the call.
metal::Work metal_backward_work(const mx::array& query, const mx::array& key, const mx::array& value,
                                const OptionalInputs& optional_inputs, const Options& options, const mx::array& out,
                                const mx::array& lse, const mx::array& dout, const std::optional<mx::array>& dlse);

// Calls of each kernel that have been evaluated since the start, or since reset_calls().
std::array<uint64_t, kNumKernels> calls();
void reset_calls();

class FlashAttention : public mx::Primitive {
 public:
  FlashAttention(mx::Stream stream, Options options, std::array<bool, kNumOptionalInputs> present)
      : mx::Primitive(stream), options_(std::move(options)), present_(present) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  std::vector<mx::array> jvp(const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;

  const char* name() const override { return "FlashAttention"; }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 private:
  // The optional inputs as pointers into `inputs`, null where absent.
  std::array<const mx::array*, kNumOptionalInputs> optional_inputs(const std::vector<mx::array>& inputs) const;

  Options options_;
  std::array<bool, kNumOptionalInputs> present_;
};

// Of query, key and value, and delta (see cpu/backward.h). Inputs: those of FlashAttention, its outputs, and the
// gradients of those.
class FlashAttentionGradient : public mx::Primitive {
 public:
  FlashAttentionGradient(mx::Stream stream, Options options, std::array<bool, kNumOptionalInputs> present)
      : mx::Primitive(stream), options_(std::move(options)), present_(present) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  std::vector<mx::array> jvp(const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;

  const char* name() const override { return "FlashAttentionGradient"; }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 private:
  Options options_;
  std::array<bool, kNumOptionalInputs> present_;
};

}  // namespace flashattn
