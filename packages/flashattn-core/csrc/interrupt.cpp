// The handler of SIGINT: when it is put in, what it asks for, and for which calls.
#include "interrupt.h"

#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

namespace nb = nanobind;

namespace flashattn {
namespace {

// Multiply-adds that take a slow processor's single core 0.2 s. A shorter call is over before Ctrl-C could end it.
constexpr double kLong = 1e9;

// The next Ctrl-C cancels the calls that name this one. After it a new one takes its place. The old one is never freed,
// 8 bytes for a Ctrl-C: calls still name it, and a handler may be about to write to it.
cpu::Cancellation first;
std::atomic<cpu::Cancellation*> current{&first};

using Handler = void (*)(int);
std::atomic<Handler> handler_of_python{nullptr};

void on_interrupt(int signal) {
  current.load(std::memory_order_acquire)->request();
  handler_of_python.load(std::memory_order_relaxed)(signal);
}

bool is_main_thread() {
#ifdef __linux__
  return gettid() == getpid();
#else
  return pthread_main_np() != 0;
#endif
}

// Whether SIGINT means KeyboardInterrupt, as it does by default. Calls functions written in C alone: Python code would
// raise it here.
bool python_raises_keyboard_interrupt() {
  nb::object signals = nb::steal(PyImport_GetModule(nb::str("_signal").ptr()));
  return signals.is_valid() && signals.attr("getsignal")(SIGINT).is(signals.attr("default_int_handler"));
}

bool belongs_to_python(Handler handler) {
  Dl_info of_handler, of_python;
  return dladdr(reinterpret_cast<void*>(handler), &of_handler) != 0 &&
         dladdr(reinterpret_cast<void*>(&PyErr_SetInterrupt), &of_python) != 0 &&
         of_handler.dli_fbase == of_python.dli_fbase;
}

// Puts on_interrupt() before Python's own handler. Python's signal.signal() takes it out again.
bool install_handler() {
  struct sigaction action;
  if (sigaction(SIGINT, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0) {
    return false;
  }
  if (action.sa_handler == on_interrupt) {
    return true;
  }
  if (!belongs_to_python(action.sa_handler)) {  // a library's or the host's, who knows what it does
    return false;
  }
  handler_of_python = action.sa_handler;
  action.sa_handler = on_interrupt;
  return sigaction(SIGINT, &action, nullptr) == 0;
}

// Whether Python knows of a SIGINT for which it has not raised KeyboardInterrupt yet.
bool interrupt_is_pending() {
  bool pending = PyOS_InterruptOccurred() != 0;  // makes Python forget it
  if (pending) {
    PyErr_SetInterrupt();
  }
  return pending;
}

}  // namespace

const cpu::Cancellation* cancelled_by_interrupt(const AttentionParams& p) {
  double scores = static_cast<double>(p.batch_size) * p.num_heads * p.query_len * p.key_len;
  if (scores * (p.head_dim + p.value_dim) < kLong || !is_main_thread()) {
    return nullptr;
  }
  nb::gil_scoped_acquire gil;
  if (!gil || !python_raises_keyboard_interrupt() || !install_handler()) {
    return nullptr;
  }
  cpu::Cancellation* cancellation = current.load(std::memory_order_relaxed);
  bool requested = cancellation->requested();  // before the next line, or a Ctrl-C between them would seem an old one
  if (interrupt_is_pending()) {                // this call, too, keeps KeyboardInterrupt waiting
    cancellation->request();
  } else if (requested) {  // by a Ctrl-C that KeyboardInterrupt has been raised for
    cancellation = new cpu::Cancellation;
    current.store(cancellation, std::memory_order_release);
    if (interrupt_is_pending()) {  // one that came before that line, to the old one
      cancellation->request();
    }
  }
  return cancellation;
}

}  // namespace flashattn
