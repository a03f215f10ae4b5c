// Recognises mx.export_function. MLX can export its own primitives, but not those of extensions.
#pragma once

namespace flashattn {

// Whether mx.export_function or mx.exporter is exporting in this thread. Walks the stack, which takes microseconds.
bool is_exporting();

}  // namespace flashattn
