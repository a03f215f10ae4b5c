// Verdicts, by what kernels are compiled for: of this process, and good ones of those before it.
#include "trust.h"

#include <sys/utsname.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <variant>

#include "../cuda/driver.h"
#include "../gpu/disk_cache.h"
#include "counts.h"
#include "gpu_call.h"
#include "mlx/device.h"
#include "mlx/version.h"
#include "recent.h"

namespace flashattn {
namespace {

enum class When { once, always, never };

When when_to_check() {
  const char* text = std::getenv("FLASHATTN_CHECK");
  std::string wanted = text ? text : "never";  // until the check has run on GPUs itself
  for (auto [word, when] : {std::pair("once", When::once), {"always", When::always}, {"never", When::never}}) {
    if (wanted == word) return when;
  }
  throw std::invalid_argument("[flash_attention] FLASHATTN_CHECK is '" + wanted +
                              "', expected 'once', 'always' or 'never'");
}

// What the kernels of a call are compiled for, and more.
struct Kind {
  Kernel kernel;  // that is taken first
  int device;
  Options options;
  Present present;
  mx::Shape query;
  int num_kv_heads, value_dim;
  mx::Dtype::Val dtypes[4];

  bool operator==(const Kind&) const = default;
};

Kind kind_of(const Inputs& inputs, Kernel kernel, const Options& options, const Present& present, int device) {
  const auto dtype = [&](Input input) {
    const mx::array* array = inputs[input];
    return array ? mx::Dtype::Val(array->dtype()) : mx::Dtype::Val::bool_;
  };
  return {kernel,
          device,
          options,
          present,
          inputs.query().shape(),
          inputs.key().shape(kHead),
          columns_of(inputs.value(), options),
          {dtype(Input::query), dtype(Input::bias), dtype(Input::sinks), dtype(Input::key_scales)}};
}

// Set once, when the module is loaded, and never destroyed: calls may outlast everything.
Check& the_check() {
  static Check& check = *new Check;
  return check;
}

// The calls of a check are not checked.
thread_local bool is_checking = false;
struct Checking {
  Uncounted uncounted;
  Checking() { is_checking = true; }
  ~Checking() { is_checking = false; }
};

// All that may change what a pipeline computes, but for its own text.
std::string software(Backend backend, mx::Device device) {
  std::string system;
  if (backend == Backend::cuda) {
    system = cuda::describe(device.index);
  } else {
    utsname names{};
    uname(&names);
    system = std::string(names.sysname) + " " + names.release;
  }
  std::string name = std::get<std::string>(mx::device_info(device).at("device_name"));
  return name + ", " + system + ", mlx " + mx::version() + ", flashattn-core " FLASHATTN_VERSION "\n";
}

// What is wrong with the kernel; empty if nothing is.
std::string verdict(const Arguments& arguments, const Inputs& inputs, Kernel kernel, mx::Stream stream) {
  static std::mutex mutex;  // not held while a kernel is checked: another thread then checks it, too
  static auto& verdicts = *new std::map<std::pair<int, std::string>, std::string>;
  const auto pipelines = [&](bool with_texts) { return pipelines_of(kernel, inputs, arguments.options, with_texts); };
  std::pair key(stream.device.index, pipelines(false));
  {
    std::lock_guard lock(mutex);
    if (auto known = verdicts.find(key); known != verdicts.end()) return known->second;
  }
  constexpr const char *kFolder = "checked", *kPassed = "passed";
  std::string wrong, on_disk = software(backend_of(kernel), stream.device) + pipelines(true);
  if (when_to_check() == When::always || gpu::read_kept(kFolder, on_disk) != kPassed) {
    Checking now;
    wrong = the_check()(arguments, kernel, stream);
    if (wrong.empty()) gpu::keep(kFolder, on_disk, kPassed);
  }
  std::lock_guard lock(mutex);
  return verdicts.emplace(key, wrong).first->second;
}

}  // namespace

void set_check(Check check) {
  the_check() = std::move(check);
}

Kernels prepare(const Arguments& arguments, Backend backend, mx::Stream stream) {
  Inputs given(arguments);
  if (given.query().size() == 0) return 0;  // what has no elements is not launched
  const Options& options = arguments.options;
  CallShape shape = call_shape(given, options, backend);
  const auto choice = [&](Kernels failed) { return choose(backend, shape, options.kernel, failed); };
  Kind kind = kind_of(given, kernel_of(choice(0)), options, present_in(arguments), stream.device.index);
  thread_local Recent<std::pair<Kind, Kernels>> prepared;
  if (const auto* known = prepared.find([&](const auto& one) { return one.first == kind; })) {
    return known->second;
  }
  std::vector<mx::array> arrays = primitive_inputs(arguments, backend, stream);
  Inputs inputs(arrays, kind.present);
  Kernels failed = 0;
  Kernel kernel = kind.kernel;
  bool is_checked = !is_checking && when_to_check() != When::never;
  for (std::string first; is_checked;) {
    std::string wrong = verdict(arguments, inputs, kernel, stream);
    if (wrong.empty()) break;
    if (first.empty()) first = wrong;
    failed = with(failed, kernel);
    Choice next = options.kernel == "auto" ? choice(failed) : Choice{};
    if (!next.kernel) throw NoKernelError("[flash_attention] " + first);
    kernel = *next.kernel;
  }
  if (backend == Backend::cuda) prepare_for_cuda(kernel, inputs, options, stream.device.index);
  if (!is_checking) prepared.keep({std::move(kind), failed});
  return failed;
}

}  // namespace flashattn
