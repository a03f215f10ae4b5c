// A cache of byte strings on disk, so that later processes can read them. cache_folder() tells where.
#pragma once

#include <string>

namespace flashattn::gpu {

// A checksum of a text, the same in every process.
std::string sum_of(const std::string& text);

// The folder that the variable FLASHATTN_CACHE names, or else this project's folder in the user's cache folder. Empty
// if no environment variable tells either of them.
std::string cache_folder();

// Returns the bytes that keep() wrote for the key, or "" if there is no such file or it is broken.
std::string read_kept(const std::string& folder, const std::string& key);

// Writes the bytes to a file and returns its path. Returns "" if that fails. Then the next process must make the bytes
// anew.
std::string keep(const std::string& folder, const std::string& key, const std::string& bytes);

}  // namespace flashattn::gpu
