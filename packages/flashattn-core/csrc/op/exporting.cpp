// MLX counts exports in InExportTracing, whose counter libmlx keeps to itself. The method that exports a function is
// among its symbols, and is a caller of whatever that function calls.
#include "exporting.h"

#include <unwind.h>

#include <cstring>

#include "mlx/export.h"

namespace flashattn {
namespace {

namespace mx = mlx::core;

using ExportMethod = void (mx::FunctionExporter::*)(const mx::Args&, const mx::Kwargs&);

// The method is private. An explicit instantiation may name it all the same.
ExportMethod export_method();
template <ExportMethod method>
struct Named {
  friend ExportMethod export_method() { return method; }
};
template struct Named<&mx::FunctionExporter::export_function>;

// A pointer to a method that is not virtual begins with its address: so the ABI of Linux and macOS has it.
uintptr_t address_of(ExportMethod method) {
  uintptr_t address = 0;
  std::memcpy(&address, &method, sizeof(address));
  return address;
}

struct Search {
  uintptr_t function;
  bool found;
};

}  // namespace

bool is_exporting() {
  Search search = {address_of(export_method()), false};
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
