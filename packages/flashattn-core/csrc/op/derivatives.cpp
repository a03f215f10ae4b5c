// Lets MLX differentiate a function with respect to its floating-point arguments.
#include "derivatives.h"

#include "mlx/ops.h"
#include "mlx/transforms.h"

namespace flashattn {
namespace {

// `arguments` holds the floating-point arguments among those in argnums. `function` takes only these.
struct Differentiated {
  std::vector<size_t> places;  // the indices of `arguments` in argnums
  std::vector<mx::array> arguments;
  Function function;
};

Differentiated floating_part(const Function& function, const std::vector<mx::array>& primals,
                             const std::vector<int>& argnums) {
  Differentiated part;
  std::vector<int> chosen;
  for (size_t place = 0; place < argnums.size(); ++place) {
    const mx::array& argument = primals[argnums[place]];
    if (mx::issubdtype(argument.dtype(), mx::floating)) {
      part.places.push_back(place);
      part.arguments.push_back(argument);
      chosen.push_back(argnums[place]);
    }
  }
  part.function = [function, primals, chosen](const std::vector<mx::array>& given) {
    std::vector<mx::array> all = primals;
    for (size_t i = 0; i < chosen.size(); ++i) {
      all[chosen[i]] = given[i];
    }
    return function(all);
  };
  return part;
}

// Returns function(a, b), as one deferred graph.
std::vector<mx::array> deferred_of(
    const std::function<std::vector<mx::array>(const std::vector<mx::array>&, const std::vector<mx::array>&)>& function,
    const std::vector<mx::array>& a, const std::vector<mx::array>& b, const mx::Stream& stream) {
  std::vector<mx::array> both = a;
  both.insert(both.end(), b.begin(), b.end());
  const auto of_both = [function, count = static_cast<ptrdiff_t>(a.size())](const std::vector<mx::array>& given) {
    return function({given.begin(), given.begin() + count}, {given.begin() + count, given.end()});
  };
  return deferred(of_both, both, stream);
}

}  // namespace

std::vector<mx::array> vjp_of(const Function& function, const std::vector<mx::array>& primals,
                              const std::vector<mx::array>& cotangents, const std::vector<int>& argnums,
                              const mx::Stream& stream) {
  const auto vjp = [function, argnums, stream](const std::vector<mx::array>& primals,
                                               const std::vector<mx::array>& cotangents) {
    Differentiated part = floating_part(function, primals, argnums);
    std::vector<mx::array> result;
    for (int argument : argnums) {
      result.push_back(mx::zeros_like(primals[argument], stream));
    }
    if (!part.places.empty()) {
      std::vector<mx::array> gradients = mx::vjp(part.function, part.arguments, cotangents).second;
      for (size_t i = 0; i < part.places.size(); ++i) {
        result[part.places[i]] = gradients[i];
      }
    }
    return result;
  };
  return argnums.empty() ? std::vector<mx::array>{} : deferred_of(vjp, primals, cotangents, stream);
}

std::vector<mx::array> jvp_of(const Function& function, const std::vector<mx::array>& primals,
                              const std::vector<mx::array>& tangents, const std::vector<int>& argnums,
                              const mx::Stream& stream) {
  const auto jvp = [function, argnums](const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents) {
    Differentiated part = floating_part(function, primals, argnums);
    std::vector<mx::array> chosen;
    for (size_t place : part.places) {
      chosen.push_back(tangents[place]);
    }
    return mx::jvp(part.function, part.arguments, chosen).second;
  };
  return deferred_of(jvp, primals, tangents, stream);
}

}  // namespace flashattn
