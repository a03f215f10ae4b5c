// MLX counts the exports under way in InExportTracing, but libmlx hides that counter. It does not hide the method that
// exports a function. So this file looks for that method on the call stack.
#include "exporting.h"

#include <unwind.h>

#include <cstring>

#include "mlx/export.h"

namespace flashattn {
namespace {

namespace mx = mlx::core;

using ExportMethod = void (mx::FunctionExporter::*)(const mx::Args&, const mx::Kwargs&);

// FunctionExporter::export_function(), which is private: only an explicit instantiation may name it.
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
