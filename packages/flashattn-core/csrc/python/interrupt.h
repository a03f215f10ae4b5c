// Ctrl-C during a long call on the CPU. MLX cannot be interrupted: Python raises KeyboardInterrupt when mx.eval
// returns, and that is when the last kernel has ended. So the long calls that the main thread waits for end early, as
// long as flashattn_core.interruptible() asks for it.
#pragma once

namespace flashattn {

// From now on, SIGINT requests that the calls that the main thread waits for end early; it goes on to the handler that
// was there. Python's signal.signal() takes it out again. Main thread only. Throws std::runtime_error where the system
// refuses.
void watch_interrupts();
void stop_watching_interrupts();

// The main thread goes on: what it has dispatched so far is waited for no more, and runs to its end.
void forget_interrupt();

}  // namespace flashattn
