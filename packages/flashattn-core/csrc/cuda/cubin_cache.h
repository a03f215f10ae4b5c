// Machine code on disk, in `flashattn/cubins` below the user's folder of caches, or below FLASHATTN_CACHE.
#pragma once

#include <string>

namespace flashattn::cuda {

// What was written for the key; empty if nothing was, or the file is broken or another's.
std::string read_cubin(const std::string& key);

// A folder that cannot be written keeps nothing: the next process compiles again.
void write_cubin(const std::string& key, const std::string& cubin);

}  // namespace flashattn::cuda
