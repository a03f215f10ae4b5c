// The calls that clang's -fsanitize=thread puts before each access to memory that is not provably the thread's own.
// There is no such call for more than 16 bytes (ulong3, long4): translate.py and arguments.h refuse such accesses.
// Only the instrumentation is used; the sanitizer's runtime, which does not know SIMD groups, is not linked.
#include <cstring>

#include "memory.h"

#define RETURN_ADDRESS __builtin_return_address(0)
#define READ(name, size)                                 \
  void name(void* address) {                             \
    access_memory(address, size, false, RETURN_ADDRESS); \
  }
#define WRITE(name, size)                               \
  void name(void* address) {                            \
    access_memory(address, size, true, RETURN_ADDRESS); \
  }
#define READ_WRITE(name, size)                           \
  void name(void* address) {                             \
    access_memory(address, size, false, RETURN_ADDRESS); \
    access_memory(address, size, true, RETURN_ADDRESS);  \
  }
#define HOOKS(size)                         \
  READ(__tsan_read##size, size)             \
  READ(__tsan_unaligned_read##size, size)   \
  WRITE(__tsan_write##size, size)           \
  WRITE(__tsan_unaligned_write##size, size) \
  READ_WRITE(__tsan_read_write##size, size) \
  READ_WRITE(__tsan_unaligned_read_write##size, size)

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
