// A cache of byte strings on disk, so that later processes can read them. cache_folder() tells where.
#pragma once

#include <string>

namespace flashattn::gpu {

// A checksum of a text, the same in every process.
std::string sum_of(const std::string& text);

// Returns $FLASHATTN_CACHE, $XDG_CACHE_HOME/flashattn or $HOME/.cache/flashattn, using the first variable that is set.
// Returns "" if none is set.
std::string cache_folder();

// Returns the bytes that keep() wrote for the key, or "" if there is no such file or it is broken.
std::string read_kept(const std::string& folder, const std::string& key);

// Writes the bytes to a file and returns its path, or "" if that fails.
std::string keep(const std::string& folder, const std::string& key, const std::string& bytes);

}  // namespace flashattn::gpu
