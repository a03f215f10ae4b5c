// A cache of byte strings on disk, for later processes: in FLASHATTN_CACHE or the user's cache folder.
#pragma once

#include <string>

namespace flashattn::gpu {

// A checksum of a text, the same in every process.
std::string sum_of(const std::string& text);

// FLASHATTN_CACHE, or this project's folder in the user's cache folder; empty if no variable names one.
std::string cache_folder();

// Returns the bytes that keep() wrote for the key, or "" if there is no such file or it is broken.
std::string read_kept(const std::string& folder, const std::string& key);

// Writes the bytes to a file. Returns its path, or "" if that fails: then the next process must make the bytes anew.
std::string keep(const std::string& folder, const std::string& key, const std::string& bytes);

}  // namespace flashattn::gpu
