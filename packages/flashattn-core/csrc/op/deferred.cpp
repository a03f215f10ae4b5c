// Defines the primitive that builds and evaluates a graph, and builds graphs of derivatives.
#include "deferred.h"

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>

#include "../dispatch/gpu_call.h"
#include "exporting.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"
#include "shapeless.h"

namespace flashattn {
namespace {

// Returns all arrays that `results` are computed from, each after its inputs. Outputs of one primitive appear once.
Arrays in_order(const Arrays& results) {
  Arrays order;
  std::unordered_set<std::uintptr_t> seen;
  const std::function<void(const mx::array&)> visit = [&](const mx::array& array) {
    if (array.status() != mx::array::Status::unscheduled || !seen.insert(array.id()).second) return;
    for (const mx::array& sibling : array.siblings()) seen.insert(sibling.id());
    for (const mx::array& input : array.inputs()) visit(input);
    order.push_back(array);
  };
  for (const mx::array& result : results) visit(result);
  return order;
}

// Keeps the arrays' memory until the stream has run the work that is queued now.
void keep_alive(Arrays arrays, const mx::Stream& stream) {
  if (stream.device == mx::Device::cpu) {
    std::vector<std::shared_ptr<mx::array::Data>> buffers;
    for (const mx::array& array : arrays) buffers.push_back(array.data_shared_ptr());
    mx::cpu::get_command_encoder(stream).dispatch([buffers = std::move(buffers)] {});
  } else {
    run_on_gpu({.launches = std::make_shared<gpu::Launches>(), .arrays = {}, .temporaries = std::move(arrays)}, stream);
  }
}

// Queues the primitives of a graph. MLX's evaluator cannot run inside of a primitive: on Metal it would commit the
// command buffer that the evaluator around it still uses.
void evaluate(const Arrays& results, const mx::Stream& stream) {
  for (mx::array& next : in_order(results)) {
    mx::array array = std::move(next);  // the last use of an array frees its memory
    Arrays outputs = array.outputs();
    mx::Primitive& primitive = array.primitive();
    if (primitive.stream() != stream) {
      throw std::logic_error(std::string(primitive.name()) + " is on another stream than the graph around it");
    }
    stream.device == mx::Device::cpu ? primitive.eval_cpu(array.inputs(), outputs)
                                     : primitive.eval_gpu(array.inputs(), outputs);
    for (const mx::array& output : outputs) output.set_status(mx::array::Status::evaluated);
    // The arrays that read `array` keep it alive. Its memory has no other owner, so that the last of them may reuse it.
    Arrays others = array.inputs();
    others.insert(others.end(), array.siblings().begin(), array.siblings().end());
    std::erase_if(others, [&](const auto& other) { return other.data_shared_ptr() == array.data_shared_ptr(); });
    array.detach();
    keep_alive(std::move(others), stream);
  }
}

class Deferred : public mx::Primitive {
 public:
  Deferred(mx::Stream stream, Function function) : mx::Primitive(stream), function_(std::move(function)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override { eval(inputs, outputs); }
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override { eval(inputs, outputs); }

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override {
    return jvp_of(function_, primals, tangents, argnums, stream());
  }
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays&) override {
    return vjp_of(function_, primals, cotangents, argnums, stream());
  }
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    Arrays results = deferred(mx::vmap(function_, axes), inputs, stream());
    return {results, std::vector<int>(results.size(), 0)};
  }

  const char* name() const override { return "FlashAttentionGraph"; }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (const mx::array& result : results(inputs, false)) shapes.push_back(result.shape());
    return shapes;
  }

  // Builds the graph from stand-ins for `inputs`, which have the inputs' elements if `with_elements` is true. The
  // stand-ins are neither traced nor computed from anything.
  Arrays results(const Arrays& inputs, bool with_elements) {
    Arrays given;
    for (const mx::array& input : inputs) {
      mx::array& stand_in = given.emplace_back(input.shape(), input.dtype(), nullptr, Arrays{});
      if (with_elements) {
        stand_in.copy_shared_buffer(input);
        stand_in.set_status(mx::array::Status::available);
      }
    }
    std::optional<mx::StreamContext> context;  // MLX's derivatives use the default stream in places
    if (mx::to_stream({}) != stream()) context.emplace(stream());
    return function_(given);
  }

 private:
  void eval(const Arrays& inputs, Arrays& outputs) {
    Arrays computed = results(inputs, true);
    evaluate(computed, stream());
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_shared_buffer(computed[i]);
  }

  Function function_;
};

// Integers and booleans have no derivative.
bool has_derivative(const mx::array& argument) {
  return mx::issubdtype(argument.dtype(), mx::floating);
}

// Returns derivative(f, arguments, primals, along) as one deferred graph; `along` are cotangents or tangents.
// `arguments` are the primals in argnums that have a derivative, and f is `function` of these alone.
template <typename Derivative>
Arrays derived(const Function& function, const Arrays& primals, const Arrays& along, const std::vector<int>& argnums,
               const mx::Stream& stream, Derivative derivative) {
  const auto graph = [function, argnums, derivative,
                      count = static_cast<ptrdiff_t>(primals.size())](const Arrays& given) {
    Arrays values(given.begin(), given.begin() + count), directions(given.begin() + count, given.end());
    std::vector<int> chosen;
    Arrays arguments;
    for (int argument : argnums) {
      if (!has_derivative(values[argument])) continue;
      chosen.push_back(argument);
      arguments.push_back(values[argument]);
    }
    const auto of_chosen = [&](const Arrays& changed) {
      Arrays all = values;
      for (size_t i = 0; i < chosen.size(); ++i) all[chosen[i]] = changed[i];
      return function(all);
    };
    return derivative(of_chosen, arguments, values, directions);
  };
  Arrays inputs = primals;
  inputs.insert(inputs.end(), along.begin(), along.end());
  return deferred(graph, inputs, stream);
}

}  // namespace

Arrays deferred(const Function& function, const Arrays& inputs, const mx::Stream& stream) {
  if (!is_shapeless() || is_exporting()) return function(inputs);
  auto primitive = std::make_shared<Deferred>(stream, function);
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const mx::array& result : primitive->results(inputs, false)) {
    shapes.push_back(result.shape());
    dtypes.push_back(result.dtype());
  }
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

Arrays vjp_of(const Function& function, const Arrays& primals, const Arrays& cotangents,
              const std::vector<int>& argnums, const mx::Stream& stream) {
  if (argnums.empty()) return {};
  const auto vjp = [argnums, stream](const Function& f, const Arrays& arguments, const Arrays& primals,
                                     const Arrays& cotangents) {
    Arrays gradients, result;
    if (!arguments.empty()) gradients = mx::vjp(f, arguments, cotangents).second;
    auto next = gradients.begin();
    for (int argument : argnums) {
      const mx::array& primal = primals[argument];
      result.push_back(has_derivative(primal) ? *next++ : mx::zeros_like(primal, stream));
    }
    return result;
  };
  return derived(function, primals, cotangents, argnums, stream, vjp);
}

Arrays jvp_of(const Function& function, const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums,
              const mx::Stream& stream) {
  const auto jvp = [argnums](const Function& f, const Arrays& arguments, const Arrays& primals,
                             const Arrays& tangents) {
    Arrays chosen;
    for (size_t i = 0; i < argnums.size(); ++i) {
      if (has_derivative(primals[argnums[i]])) chosen.push_back(tangents[i]);
    }
    return mx::jvp(f, arguments, chosen).second;
  };
  return derived(function, primals, tangents, argnums, stream, jvp);
}

}  // namespace flashattn
