// MLX counts the running exports in InExportTracing, but libmlx hides that counter. The method that exports a function
// is not hidden, so this file looks for that method on the call stack.
#include "exporting.h"

#include <unwind.h>

#include <cstring>

#include "mlx/export.h"

namespace flashattn {
namespace {

namespace mx = mlx::core;

using ExportMethod = void (mx::FunctionExporter::*)(const mx::Args&, const mx::Kwargs&);

// Returns FunctionExporter::export_function(). That method is private, and only an explicit instantiation of a template
// may name a private member.
ExportMethod export_method();
template <ExportMethod method>
struct Named {
  friend ExportMethod export_method() { return method; }
};
template struct Named<&mx::FunctionExporter::export_function>;

struct Search {
  uintptr_t function;
  bool found;
};

}  // namespace

bool is_exporting() {
  // In the ABI of Linux and macOS, a pointer to a non-virtual method begins with the address of its code.
  ExportMethod method = export_method();
  Search search = {};
  std::memcpy(&search.function, &method, sizeof(search.function));
  _Unwind_Backtrace(
      [](_Unwind_Context* context, void* argument) {
        auto& search = *static_cast<Search*>(argument);
        search.found = search.found || _Unwind_GetRegionStart(context) == search.function;
        return search.found ? _URC_END_OF_STACK : _URC_NO_REASON;
      },
      &search);
  return search.found;
}

}  // namespace flashattn
