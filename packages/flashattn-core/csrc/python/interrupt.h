// Ctrl-C in a long call on the CPU. MLX cannot be interrupted: Python raises KeyboardInterrupt when mx.eval
// returns, after the last kernel. So while flashattn_core.interruptible() is active, Ctrl-C ends the long calls that
// the main thread waits for.
#pragma once

namespace flashattn {

// Installs a SIGINT handler that ends long calls of the main thread, then calls the previous handler. Python's
// signal.signal() replaces it. Main thread only. Throws std::runtime_error if the system refuses, or the previous
// handler has the SA_SIGINFO form.
void watch_interrupts();
void stop_watching_interrupts();

// The main thread goes on: it no longer waits for the calls that it has dispatched so far, so they run to their end.
void forget_interrupt();

}  // namespace flashattn
