// Ctrl-C in a long call on the CPU. MLX cannot be interrupted: Python raises KeyboardInterrupt when mx.eval returns,
// after the last kernel. While flashattn_core.interruptible() is active, Ctrl-C therefore ends the long calls that the
// main thread waits for.
#pragma once

namespace flashattn {

// Installs a SIGINT handler that ends long calls of the main thread, then calls the previous handler. Python's
// signal.signal() replaces it. Main thread only. Throws std::runtime_error if the system refuses, or the previous
// handler has the SA_SIGINFO form.
void watch_interrupts();
void stop_watching_interrupts();

// Call this when the main thread stops waiting for the calls that it has dispatched. These calls then run to their end.
void forget_interrupt();

}  // namespace flashattn
