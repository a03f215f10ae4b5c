// Whether a function is being exported. MLX writes no primitive of an extension to a file: it keeps a list of its own.
#pragma once

namespace flashattn {

// In this thread, by mx.export_function or mx.exporter. Takes microseconds: each caller on the stack is looked at.
bool is_exporting();

}  // namespace flashattn
