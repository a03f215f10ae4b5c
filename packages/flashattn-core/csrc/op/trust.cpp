// Verdicts, by what kernels are compiled for: of this process, and good ones of those before it.
#include "trust.h"

#include <sys/utsname.h>

#include <cstdlib>
#include <future>
#include <map>
#include <mutex>
#include <utility>
#include <variant>
#include <vector>

#include "../cuda/driver.h"
#include "../gpu/disk_cache.h"
#include "counts.h"
#include "gpu_call.h"
#include "mlx/device.h"
#include "mlx/version.h"

namespace flashattn {
namespace {

enum class When { once, always, never };

When when_to_check() {
  const char* text = std::getenv("FLASHATTN_CHECK");
  std::string wanted = text ? text : "once";
  for (auto [word, when] : {std::pair("once", When::once), {"always", When::always}, {"never", When::never}}) {
    if (wanted == word) return when;
  }
  throw std::invalid_argument("[flash_attention] FLASHATTN_CHECK is '" + wanted +
                              "', expected 'once', 'always' or 'never'");
}

// Set once, when the module is loaded, and never destroyed: calls may outlast everything.
Check& the_check() {
  static Check& check = *new Check;
  return check;
}

thread_local bool checking = false;
struct Checking {
  Uncounted uncounted;
  Checking() { checking = true; }
  ~Checking() { checking = false; }
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

// All at once: each takes the compiler a second. What does not compile fails again in the check, which says so.
void compile(const std::vector<gpu::Launch>& pipelines, int device) {
  std::vector<std::future<CUfunction>> all;
  for (const gpu::Launch& launch : pipelines) {
    all.push_back(std::async(std::launch::async, cuda::function_of, launch, device));
  }
}

std::string check(Tiled kernel, const Arguments& arguments, const std::vector<gpu::Launch>& pipelines,
                  mx::Stream stream) {
  constexpr const char *kFolder = "checked", *kPassed = "passed";
  Backend backend = backend_of(kernel.kernel);
  std::string on_disk = software(backend, stream.device) + name(kernel) + "\n";
  for (const gpu::Launch& launch : pipelines) {
    on_disk += launch.specialisation + " " + gpu::sum_of(source_text(launch, backend)) + "\n";
  }
  if (when_to_check() != When::always && gpu::read_kept(kFolder, on_disk) == kPassed) {
    return "";
  }
  if (backend == Backend::cuda) compile(pipelines, stream.device.index);
  Checking now;
  std::string wrong = the_check()(arguments, kernel, stream);
  if (wrong.empty()) gpu::keep(kFolder, on_disk, kPassed);
  return wrong;
}

}  // namespace

void set_check(Check check) {
  the_check() = std::move(check);
}

bool is_checking() {
  return checking;
}

std::string wrong_with(Tiled kernel, const Arguments& arguments, const Inputs& inputs, mx::Stream stream) {
  static std::mutex mutex;  // not held while a kernel is checked: another thread then checks it, too
  static auto& verdicts = *new std::map<std::string, std::string>;
  if (checking || when_to_check() == When::never) {
    return "";
  }
  std::vector<gpu::Launch> pipelines = pipelines_of(kernel, inputs, arguments.options);
  std::string key = std::to_string(stream.device.index) + " " + name(kernel);
  for (const gpu::Launch& launch : pipelines) key += " " + launch.specialisation;
  {
    std::lock_guard lock(mutex);
    if (auto known = verdicts.find(key); known != verdicts.end()) return known->second;
  }
  std::string wrong = check(kernel, arguments, pipelines, stream);
  std::lock_guard lock(mutex);
  return verdicts.emplace(key, wrong).first->second;
}

}  // namespace flashattn
