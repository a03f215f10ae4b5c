// Ctrl-C during a long call on the CPU. MLX cannot be interrupted: Python raises KeyboardInterrupt once mx.eval
// returns, after the last kernel. So while flashattn_core.interruptible() is active, Ctrl-C makes the long calls that
// the main thread waits for end early.
#pragma once

namespace flashattn {

// Installs a SIGINT handler that makes calls that the main thread waits for end early, and then calls the handler that
// was there before. Python's signal.signal() replaces it. Main thread only. Throws std::runtime_error if the system
// refuses.
void watch_interrupts();
void stop_watching_interrupts();

// The main thread goes on: it no longer waits for the calls that it has dispatched so far, so they run to their end.
void forget_interrupt();

}  // namespace flashattn
