// Bytes on disk by their key, in the user's folder of caches, or in FLASHATTN_CACHE: for the next process.
#pragma once

#include <string>

namespace flashattn::gpu {

// Of a text, for comparisons with other processes.
std::string sum_of(const std::string& text);

// The user's; empty where the system names none.
std::string cache_folder();

// What was kept in this folder of the cache for the key; empty if nothing was, or the file is broken or another's.
std::string read_kept(const std::string& folder, const std::string& key);

// Returns the file. A cache that cannot be written keeps nothing, and the next process makes the bytes again.
std::string keep(const std::string& folder, const std::string& key, const std::string& bytes);

}  // namespace flashattn::gpu
