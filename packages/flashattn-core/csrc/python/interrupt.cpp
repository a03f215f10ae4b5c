// Installs the SIGINT handler, and decides which calls it may cancel.
#include "interrupt.h"

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <stdexcept>

#include "../dispatch/cpu_call.h"

#ifndef __linux__
#include <pthread.h>
#endif

namespace nb = nanobind;

namespace flashattn {
namespace {

// Calls with fewer multiply-adds cannot be cancelled, because even one slow core needs only 0.2 s for them.
constexpr double kLong = 1e9;

// Never freed: calls and the handler point to it.
cpu::Cancellation& cancellation = *new cpu::Cancellation;

using Handler = void (*)(int);
std::atomic<Handler> next_handler{nullptr};

void on_interrupt(int signal) {
  cancellation.request();
  next_handler.load(std::memory_order_relaxed)(signal);
}

bool is_main_thread() {
#ifdef __linux__
  return gettid() == getpid();
#else
  return pthread_main_np() != 0;
#endif
}

// Python calls main_thread_goes_on() when the main thread next runs Python code, for example after mx.eval. The main
// thread then waits no longer for the calls that it dispatched, so the next epoch begins. Some of these calls may still
// run, if mx.async_eval dispatched them.
std::atomic<bool> is_pending{false};  // whether Python is going to call main_thread_goes_on()
int main_thread_goes_on(void*) {
  is_pending = false;
  cancellation.begin_epoch();
  return 0;
}

// Only long calls that the main thread dispatches can be cancelled.
cpu::Cancellable cancellable(const AttentionParams& p) {
  double scores = static_cast<double>(p.batch_size) * p.num_heads * p.query_len * p.key_len;
  if (scores * (p.head_dim + p.value_dim) < kLong || !is_main_thread()) {
    return {};
  }
  if (!is_pending.exchange(true) && Py_AddPendingCall(main_thread_goes_on, nullptr) != 0) {
    is_pending = false;  // Python's list of pending calls is full, so main_thread_goes_on() would not run
    return {};
  }
  return {&cancellation, cancellation.epoch()};
}

}  // namespace

void watch_interrupts() {
  struct sigaction action;
  if (sigaction(SIGINT, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0) {
    throw std::runtime_error("SIGINT already has a handler of the SA_SIGINFO form, which ours cannot call");
  }
  if (action.sa_handler == on_interrupt) {
    return;
  }
  next_handler = action.sa_handler;
  action.sa_handler = on_interrupt;
  if (sigaction(SIGINT, &action, nullptr) != 0) {
    throw std::runtime_error("the system refuses to install a handler for SIGINT");
  }
  set_cancellation_source(cancellable);
}

void stop_watching_interrupts() {
  set_cancellation_source(nullptr);
  cancellation.begin_epoch();
}

void forget_interrupt() {
  cancellation.begin_epoch();
}

}  // namespace flashattn
