// Ctrl-C during a long call on the CPU. MLX cannot be interrupted: Python raises KeyboardInterrupt when mx.eval
// returns, and that is when the last kernel has ended. So the long calls that the main thread has dispatched end early.
#pragma once

#include "cpu/cancellation.h"

namespace flashattn {

// What the call that is being dispatched by this thread shall name as AttentionArgs::cancellation: it is requested by
// the SIGINT for which Python raises KeyboardInterrupt in this thread. Null, so that the call runs to its end whatever
// comes, if it is short, if this is not the main thread, or if the program handles SIGINT in its own way.
//
// Takes the GIL, unless the call is short.
const cpu::Cancellation* cancelled_by_interrupt(const AttentionParams& params);

}  // namespace flashattn
