// With -fsanitize=thread, clang calls these functions before each access to memory, unless the memory is provably
// private to the thread. There is no function for more than 16 bytes (ulong3, long4), so translate.py and arguments.h
// refuse such accesses. ThreadSanitizer's runtime is not linked, because it knows nothing about SIMD groups.
#include <cstring>

#include "memory.h"

#define RETURN_ADDRESS __builtin_return_address(0)
#define READ(name, size, alignment)                      \
  void name(void* address) {                             \
    access_memory(address, size, false, RETURN_ADDRESS); \
    check_alignment(address, alignment, RETURN_ADDRESS); \
  }
#define WRITE(name, size, alignment)                     \
  void name(void* address) {                             \
    access_memory(address, size, true, RETURN_ADDRESS);  \
    check_alignment(address, alignment, RETURN_ADDRESS); \
  }
#define READ_WRITE(name, size, alignment)                \
  void name(void* address) {                             \
    access_memory(address, size, false, RETURN_ADDRESS); \
    access_memory(address, size, true, RETURN_ADDRESS);  \
    check_alignment(address, alignment, RETURN_ADDRESS); \
  }
#define HOOKS(size)                               \
  READ(__tsan_read##size, size, size)             \
  READ(__tsan_unaligned_read##size, size, 1)      \
  WRITE(__tsan_write##size, size, size)           \
  WRITE(__tsan_unaligned_write##size, size, 1)    \
  READ_WRITE(__tsan_read_write##size, size, size) \
  READ_WRITE(__tsan_unaligned_read_write##size, size, 1)

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_init() {}
void* __tsan_memcpy(void* to, const void* from, size_t size) {
  access_memory(from, size, false, RETURN_ADDRESS);
  access_memory(to, size, true, RETURN_ADDRESS);
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
  access_memory(from, size, false, RETURN_ADDRESS);
  access_memory(to, size, true, RETURN_ADDRESS);
  return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  access_memory(to, size, true, RETURN_ADDRESS);
  return memset(to, value, size);
}
}
