// Converts the runtime's untyped pointers to the types of a kernel's arguments. Reads function constants (bool, int).
#pragma once

namespace metal {
namespace binding {
template <int Position, class Function>
struct argument;
template <int Position, class Result, class First, class... Rest>
struct argument<Position, Result(First, Rest...)> : argument<Position - 1, Result(Rest...)> {};
template <class Result, class First, class... Rest>
struct argument<0, Result(First, Rest...)> {
  using type = First;
};
template <auto* Function, int Position>
using argument_t = typename argument<Position, __remove_pointer(decltype(Function))>::type;

template <class T>
struct pointee;
template <class T>
struct pointee<T*> {
  using type = T;
  static T* cast(void* address) { return (T*)address; }
};
template <class T>
struct pointee<T&> {
  using type = T;
  static T& cast(void* address) { return *(T*)address; }
};

template <class T>
T builtin(const unsigned* values) {
  T result{};
  if constexpr (vector_traits<T>::is_vector) {
    for (int i = 0; i < vector_traits<T>::size; i++) result[i] = (element_t<T>)values[i];
  } else {
    result = (T)values[0];
  }
  return result;
}

template <auto* Function, int Position>
MslBinding describe(const char* name, bool is_constant, int index, bool is_wanted) {
  using Argument = argument_t<Function, Position>;
  using Element = typename pointee<Argument>::type;
  static_assert(!vector_traits<remove_cv_t<Element>>::is_vector || sizeof(Element) <= 16,
                "vectors of 32 bytes in memory would be neither checked nor counted");
  return {name, is_constant, index, __is_const(Element), __is_reference(Argument), is_wanted, sizeof(Element)};
}

template <class T>
T function_constant(int index) {
  T value{};
  msl_constant(index, &value, sizeof value);
  return value;
}
}  // namespace binding
}  // namespace metal

// translate.py appends code that uses these macros to the kernels' text.
#define MSL_POINTER(function, position, index) \
  metal::binding::pointee<metal::binding::argument_t<function, position>>::cast(thread_->buffers[index])
#define MSL_BUILTIN(function, position, name) \
  metal::binding::builtin<metal::remove_cv_t<metal::binding::argument_t<function, position>>>(thread_->values[name])
