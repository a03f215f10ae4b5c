// A disk cache of byte strings for later processes, in the user's cache folder or in FLASHATTN_CACHE.
#pragma once

#include <string>

namespace flashattn::gpu {

// A checksum of a text, the same in every process.
std::string sum_of(const std::string& text);

// FLASHATTN_CACHE, or this project's folder in the user's cache folder; empty if no variable names one.
std::string cache_folder();

// Returns the bytes that keep() wrote for the key; empty if there are none, or the file is broken or for another key.
std::string read_kept(const std::string& folder, const std::string& key);

// Writes a file, returns its path. Returns "" if that fails: then the next process makes the bytes again.
std::string keep(const std::string& folder, const std::string& key, const std::string& bytes);

}  // namespace flashattn::gpu
