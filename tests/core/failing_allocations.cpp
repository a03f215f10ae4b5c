// A library for LD_PRELOAD that makes one allocation of the extension fail. fail_at() chooses which one.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

extern "C" void* __libc_malloc(size_t);
extern "C" void* __libc_memalign(size_t, size_t);

namespace {

std::atomic<long> left{-1};  // how many allocations succeed before one fails; below 0, none fails

bool fails(void* caller) {
  Dl_info info;
  if (left < 0 || !dladdr(caller, &info)) return false;
  bool is_ours = std::strstr(info.dli_fname, "/_ext.") || std::strstr(info.dli_fname, "/libflashattn_kernels.");
  return is_ours && left.fetch_sub(1) == 0;
}

void* allocate(size_t size, void* caller) {
  void* memory = fails(caller) ? nullptr : __libc_malloc(size);
  if (!memory) {
    throw std::bad_alloc();
  }
  return memory;
}

}  // namespace

// Makes one allocation fail. If `number` is 0, the next allocation fails, and if it is -1, none. Returns false if an
// earlier fail_at() chose an allocation that has not happened yet.
extern "C" bool fail_at(long number) {
  return left.exchange(number) < 0;
}

extern "C" void* malloc(size_t size) {
  return fails(__builtin_return_address(0)) ? nullptr : __libc_malloc(size);
}
extern "C" void* aligned_alloc(size_t alignment, size_t size) {
  return fails(__builtin_return_address(0)) ? nullptr : __libc_memalign(alignment, size);
}
void* operator new(size_t size) {
  return allocate(size, __builtin_return_address(0));
}
void* operator new[](size_t size) {
  return allocate(size, __builtin_return_address(0));
}
