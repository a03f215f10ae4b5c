// Lets Ctrl-C end long calls on the CPU early. MLX itself cannot be interrupted: Python raises KeyboardInterrupt only
// when mx.eval returns, after the last kernel. So while flashattn_core.interruptible() is active, Ctrl-C ends the long
// calls that the main thread waits for.
#pragma once

namespace flashattn {

// Installs a SIGINT handler that ends long calls of the main thread, then calls the previous handler. A later call of
// Python's signal.signal() replaces the new handler. Call this only in the main thread. Throws std::runtime_error if
// the system refuses, or if the previous handler has the SA_SIGINFO form.
void watch_interrupts();
void stop_watching_interrupts();

// Call this when the main thread stops waiting for the calls that it has dispatched. These calls then run to their end.
void forget_interrupt();

}  // namespace flashattn
